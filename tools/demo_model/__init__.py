"""Training of the model in `fastkv/demo/model`: `python -m tools.demo_model --help`.

- `circuit`: shape and starting weights.
- `training`: what it is trained on, the loss and the steps.
- `card`: measuring it, and the files with the model card.
- `heads`: the heads that DuoAttention keeps whole.
"""
