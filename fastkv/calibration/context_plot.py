"""The picture of a context calibration: measured quality over the share kept, and the fitted curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from .context_triples import Triple
from .quality import QualityCurve, retained

LEVELS = (0.1, 0.5, 0.9)  # quantiles of the NLL whose curves are drawn


def write_plot(fitted: Sequence[tuple[QualityCurve, Sequence[Triple]]], path: Path) -> None:
    """Write a PNG with one panel a policy: triples coloured by the context's NLL, curves at three levels of it."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    every = torch.tensor([triple.nll for _, triples in fitted for triple in triples], dtype=torch.float64)
    norm, colours = Normalize(float(every.min()), float(every.max())), colormaps["viridis"]
    shares = torch.linspace(0, 1, 201, dtype=torch.float64)

    figure = Figure(figsize=(4.2 * len(fitted) + 1.0, 4.2), layout="constrained", dpi=150)
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, len(fitted), sharey=True, squeeze=False)[0]
    for axis, (curve, triples) in zip(axes, fitted):
        keep, nll, quality = (list(column) for column in zip(*triples))
        axis.scatter(keep, quality, c=nll, cmap=colours, norm=norm, s=16, alpha=0.6, linewidths=0)
        for level in torch.tensor(nll, dtype=torch.float64).quantile(torch.tensor(LEVELS, dtype=torch.float64)):
            line = retained(shares, curve.steepness(level))
            axis.plot(shares, line, color=colours(norm(float(level))), label=f"NLL {level:.2f}", linewidth=2)
        axis.set_title(curve.policy, fontsize=11)
        axis.set_xlabel("share of the context kept")
        axis.grid(color="#dddddd", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, fontsize=8)
    axes[0].set_ylabel("quality: NLL ratio of the answers")
    axes[0].set_ylim(-0.02, 1.04)
    figure.colorbar(ScalarMappable(norm, colours), ax=list(axes), label="NLL of the context, nats per token")
    figure.savefig(path)
