"""Scores from the geometry of the keys, and from attention without a query in mind: ManifoldKV and Compactor.

Unlike the scores in `scores`, windows and chunks depend on the order of the tokens along N: pass them in order of
position. A chunk counts real tokens only, so padding on either side changes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import FastKVError, check_groups, check_shape
from .attention import grouped_logits, masked_softmax, with_sink
from .gather import rows_at
from .moments import compute_dtype
from .slots import hadamard

METRICS = ("l2", "l1", "linf", "cosine")
LEVERAGE_METHODS = ("cholesky", "qr", "svd", "eig", "exact", "srht")
RIDGE = 1e-6  # of the mean eigenvalue of the Gram matrix: far below any kept direction, far above rounding in float64


def _real(keys: Tensor, mask: Tensor | None) -> Tensor:
    """The mask [B, Hkv, N], or all true."""
    if mask is None:
        return torch.ones(keys.shape[:3], dtype=torch.bool, device=keys.device)
    check_shape("mask", "mask", mask, keys.shape[:3])
    return mask


def check_metric(metric: str, window: int | None) -> None:
    """Raise FastKVError unless `manifold_scores` knows the metric and the window is None or positive."""
    if metric not in METRICS:
        raise FastKVError(f"manifold: metric must be one of {', '.join(METRICS)}, got {metric!r}")
    if window is not None and window < 1:
        raise FastKVError(f"manifold: window must be None or at least 1 token, got {window}; the paper uses 4096")


def manifold_scores(
    keys: Tensor, window: int | None = None, metric: str = "l2", *, mask: Tensor | None = None
) -> Tensor:
    """Keys far from the mean key are kept: score_i = |k_i - mu| (ManifoldKV, Sec. 3.1 and 3.3).

    mu is the mean key of the head, or of the window of `window` consecutive tokens that holds token i (the last one may
    be shorter; selection stays global). Metrics: l2 (the method), l1, linf and cosine distance 1 - cos (its Table 7).

    Args: keys [B, Hkv, N, D] post-RoPE, in order of position if windowed; mask [B, Hkv, N] bool, true for real tokens.
    Returns: [B, Hkv, N] fp32 (fp64 for fp64 keys), 0 where not real.
    Raises: FastKVError for an unknown metric or a window below 1.
    """
    check_metric(metric, window)
    batch, heads, num, dim = keys.shape
    real, keys = _real(keys, mask), keys.to(compute_dtype(keys))
    if mask is not None:
        keys = torch.where(real[..., None], keys, 0)
    if window is None or window >= num:
        center = keys.sum(2, keepdim=True) / real.sum(-1).clamp(min=1)[..., None, None]
    else:
        label = (real.cumsum(-1) - 1).clamp(min=0) // window
        count = torch.zeros(batch, heads, -(-num // window), dtype=keys.dtype, device=keys.device)
        total = count[..., None].expand(-1, -1, -1, dim).clone()
        count.scatter_add_(2, label, real.to(keys.dtype))
        each = label[..., None].expand(-1, -1, -1, dim)
        total.scatter_add_(2, each, keys)
        center = (total / count.clamp(min=1)[..., None]).gather(2, each)
    if metric == "cosine":
        score = 1 - (F.normalize(keys, dim=-1) * F.normalize(center, dim=-1)).sum(-1)
    else:
        score = torch.linalg.vector_norm(keys - center, {"l2": 2, "l1": 1, "linf": float("inf")}[metric], dim=-1)
    return torch.where(real, score, 0)


def sketch_matrix(
    dim: int,
    size: int,
    generator: torch.Generator | None = None,
    *,
    kind: str = "gaussian",
    device: torch.device | str | None = None,
) -> Tensor:
    """Right sketch Phi [dim, size], fp32, with E[Phi Phi^T] = I: entries N(0, 1 / size), or a subsampled Hadamard.

    Entries are rounded to bfloat16, so that half-precision kernels multiply with exactly the same matrix.
    "srht" is sqrt(m / size) D H R: random signs, orthonormal Walsh-Hadamard transform of size m (the next power of
    two), `size` of its columns without replacement. The default generator is seeded with 0, so runs repeat.
    """
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    where = generator.device
    if kind == "gaussian":
        sketch = torch.randn(dim, size, generator=generator, device=where)
    else:
        padded = 1 << (dim - 1).bit_length()
        signs = 2.0 * torch.randint(0, 2, (dim,), generator=generator, device=where) - 1
        chosen = torch.randperm(padded, generator=generator, device=where)[:size]
        sketch = signs[:, None] * hadamard(padded, where, torch.float32)[:dim, chosen]
    sketch = sketch / size**0.5
    return sketch.to(torch.bfloat16).to(device or where, torch.float32)


def _orthonormal_row_norms(rows: Tensor, method: str) -> Tensor:
    """Squared row norms of an orthonormal basis of the column space of `rows` [..., N, k]; rank may be below k.

    In float64: a Gram matrix squares the condition number. Directions that rounding of the rows makes do not count.
    """
    wide = rows.double()
    if method == "cholesky":  # a ridge for directions without any key
        gram = wide.transpose(-1, -2) @ wide
        ridge = RIDGE * gram.diagonal(dim1=-2, dim2=-1).mean(-1) + torch.finfo(torch.float32).tiny
        gram.diagonal(dim1=-2, dim2=-1).add_(ridge[..., None])
        factor = torch.linalg.cholesky_ex(gram, check_errors=False).L
        basis = torch.linalg.solve_triangular(factor, wide.transpose(-1, -2), upper=False)
        return basis.square().sum(-2).to(rows.dtype)
    finite = wide.isfinite().all(-1).all(-1)[..., None]
    wide = torch.where(finite[..., None], wide, 0)  # these refuse a whole batch for one NaN in it
    if method == "eig":  # in fp32 the paper has to clamp small values
        energy, basis = torch.linalg.eigh(wide.transpose(-1, -2) @ wide)
        size = energy.clamp(min=torch.finfo(energy.dtype).tiny).sqrt()  # rounding may make them negative
        basis = wide @ (basis / size[..., None, :])
    elif method == "qr":
        # Without pivoting Q spans more than the columns if they are dependent; the small R says which part counts.
        basis, corner = torch.linalg.qr(wide)
        left, size, _ = torch.linalg.svd(corner, full_matrices=False)
        basis = basis @ left
    else:
        basis, size, _ = torch.linalg.svd(wide, full_matrices=False)
    least = size.amax(-1, keepdim=True) * (torch.finfo(rows.dtype).eps * rows.shape[-1])
    score = torch.where((size > least)[..., None, :], basis, 0).square().sum(-1)
    return torch.where(finite, score.to(rows.dtype), torch.nan)


def leverage_scores(
    pre_rope_keys: Tensor,
    sketch_dim: int | None = 64,
    method: str = "cholesky",
    generator: torch.Generator | None = None,
    *,
    mask: Tensor | None = None,
    centre: bool = False,
) -> Tensor:
    """Approximate statistical leverage of each key: how much its direction is its own (Compactor, Alg. 1).

    With X = K Phi and U an orthonormal basis of the columns of X, score_i = |U_i|^2; U = X L^-T for X^T X = L L^T
    ("cholesky", with a relative ridge), from a rank-revealing QR ("qr"), from an SVD ("svd"), or X V Lambda^-1/2 for
    X^T X = V Lambda V^T ("eig", App. C). "exact" is the SVD of K itself; "srht" is Cholesky with a subsampled Hadamard
    sketch instead of a Gaussian one. All heads share one sketch. Unsketched scores lie in [0, 1] and sum to the rank of
    K. Rank-deficient keys are fine.

    Args: pre_rope_keys [B, Hkv, N, D] (keys before the rotation); sketch_dim: columns of Phi, None or >= D for no
        sketch; generator: of the sketch, seeded with 0 by default; mask [B, Hkv, N] bool, true for real tokens; centre:
        subtract the mean key first (as in the authors' later code, not in the paper: leverage then ignores the
        direction all keys share).
    Returns: [B, Hkv, N] fp32 (fp64 for fp64 keys), 0 where not real.
    Raises: FastKVError for an unknown method or a sketch_dim below 1.
    """
    sketch = make_sketch(pre_rope_keys, sketch_dim, method, generator)
    return sketched_leverage(pre_rope_keys, sketch, method, mask=mask, centre=centre)


def make_sketch(
    keys: Tensor, sketch_dim: int | None, method: str, generator: torch.Generator | None = None
) -> Tensor | None:
    """The sketch [D, sketch_dim] that `leverage_scores` uses for keys [B, Hkv, N, D], or None if it needs none."""
    check_leverage(sketch_dim, method)
    dim = keys.shape[-1]
    if method == "exact" or sketch_dim is None or sketch_dim >= dim:
        return None
    kind = "srht" if method == "srht" else "gaussian"
    return sketch_matrix(dim, sketch_dim, generator, kind=kind, device=keys.device)


def sketched_leverage(
    keys: Tensor, sketch: Tensor | None, method: str, *, mask: Tensor | None = None, centre: bool = False
) -> Tensor:
    """`leverage_scores` with a given sketch [D, k] fp32, or None for the keys themselves."""
    real = _real(keys, mask)
    rows = torch.where(real[..., None], keys.to(compute_dtype(keys)), 0)
    if rows.shape[2] == 0:
        return rows.new_zeros(rows.shape[:3])
    if centre:
        mean = rows.sum(2, keepdim=True) / real.sum(-1).clamp(min=1)[..., None, None]
        rows = torch.where(real[..., None], rows - mean, 0)
    if sketch is not None:
        rows = rows @ sketch.to(rows.dtype)
    score = _orthonormal_row_norms(rows, {"srht": "cholesky", "exact": "svd"}.get(method, method))
    return torch.where(real, score, 0)


def check_leverage(sketch_dim: int | None, method: str) -> None:
    """Raise FastKVError unless `leverage_scores` knows the method and the sketch has at least one column."""
    if method not in LEVERAGE_METHODS:
        raise FastKVError(f"leverage: method must be one of {', '.join(LEVERAGE_METHODS)}, got {method!r}")
    if sketch_dim is not None and sketch_dim < 1:
        raise FastKVError(f"leverage: sketch_dim must be None or at least 1, got {sketch_dim}; the paper uses 64")


def noncausal_attention_mass(
    q: Tensor,
    keys: Tensor,
    scale: float,
    chunk: int = 256,
    *,
    softcap: float | None = None,
    mask: Tensor | None = None,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Attention each key receives from the queries of its chunk, past and future (Compactor, Sec. 3.3), before pooling.

    Tokens are cut into chunks of `chunk` consecutive real tokens. Within a chunk, without a causal mask,
    mass_j = mean over the group of sum_i softmax(scale * q_i . k_j over j)[j]. The last chunk is as long as it is: the
    masses of a chunk of r tokens sum to r, whatever r is, less what sinks take.

    Args: q [B, Hq, N, D] post-RoPE; keys [B, Hkv, N, D] post-RoPE, in order of position; mask [B, Hkv, N] bool, true
        for real tokens, which alone ask and are asked; sink_logits [Hq], see `with_sink`.
    Returns: [B, Hkv, N] fp32 (fp64 for fp64 inputs), 0 where not real.
    Raises: FastKVError if Hq % Hkv, shapes disagree or chunk < 1.
    """
    batch, num_heads, num, dim = q.shape
    heads = keys.shape[1]
    groups = check_groups("noncausal_attention_mass", num_heads, heads)
    check_shape("noncausal_attention_mass", "keys", keys, (batch, heads, num, dim))
    if chunk < 1:
        raise FastKVError(f"noncausal_attention_mass: chunk must be at least 1 token, got {chunk}; the paper uses 256")
    dtype = compute_dtype(q)
    real = _real(keys, mask)
    order = (~real).to(torch.uint8).argsort(dim=-1, stable=True)  # real tokens first, in order
    inside = real.gather(-1, order)
    mass = torch.zeros(batch, heads, num, dtype=dtype, device=q.device)
    for start in range(0, num, chunk):
        rows = order[..., start : start + chunk]
        usable = inside[..., start : start + chunk]
        query, key = rows_at(q, rows.repeat_interleave(groups, 1)), rows_at(keys, rows)
        logits = grouped_logits(query, key, scale, softcap)
        probs, lse = masked_softmax(logits, usable[:, :, None, :, None] & usable[:, :, None, None])
        probs, _ = with_sink(probs, lse, None if sink_logits is None else sink_logits.view(heads, groups, 1))
        mass.scatter_(-1, rows, probs.sum((2, 3)) / groups)
    return mass
