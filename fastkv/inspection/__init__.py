"""What the keys of a model look like, so that a user can see which policy suits it: `fastkv inspect`.

- `dimension`: intrinsic dimension of a cloud of keys: PCA, Two-NN, Levina-Bickel.
- `geometry`: norms, anchor similarity, centroid dilution, rank and leverage of one layer.
- `report`: the table, the advice, the picture.
- `run`: reads a text with the stock model and puts the rest together.
"""
