"""How much each cached token matters. All scores are [B, Hkv, N] float, larger = keep, and never +-inf.

Order of tokens along N does not matter to any of them: decode eviction overwrites slots, so whatever depends on order
uses the stored `positions`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import FastKVError, check_groups, check_shape
from ..rotary import Rotary
from .attention import grouped_logits, masked_softmax
from .moments import compute_dtype
from .selection import in_order

ANCHORS = ("mean", "normalized_mean", "median", "pairwise")
DISTANCES = ("cosine", "dot", "euclidean")
TINY = torch.finfo(torch.float32).tiny
WATCHED = 256  # queries observed at once where a policy watches all of them
EPSILON = 1e-12  # a key of no length has the cosine 0 with everything


def check_keydiff(anchor: str, distance: str) -> None:
    """Raise FastKVError unless the two name a variant that `keydiff_scores` knows."""
    if anchor not in ANCHORS or distance not in DISTANCES:
        raise FastKVError(
            f"keydiff: anchor must be one of {', '.join(ANCHORS)} and distance one of {', '.join(DISTANCES)}, "
            f"got {anchor!r} and {distance!r}"
        )
    if anchor == "pairwise" and distance != "cosine":
        raise FastKVError(f"keydiff: anchor 'pairwise' is defined for cosine only, got {distance!r}; use cosine")


def keydiff_scores(
    keys: Tensor,
    anchor: str = "mean",
    *,
    distance: str = "cosine",
    mask: Tensor | None = None,
    positions: Tensor | None = None,
    rotary: Rotary | None = None,
) -> Tensor:
    """Keys unlike the others are kept: score_i = -cos(a, k_i) (KeyDiff, arXiv:2504.15364, Sec. 3.2).

    The anchor a is the mean of the cached keys ("mean", the default), the mean of the normalised keys
    ("normalized_mean", Eq. 8) or their coordinate-wise median ("median"). "pairwise" sums the cosine with every key
    (Eq. 7) at O(N^2) cost. Distances other than cosine are the paper's ablation: -a.k ("dot"), |a - k| ("euclidean").

    Args: keys [B, Hkv, N, D] post-RoPE; mask [B, Hkv, N] bool, true for real tokens (default all); positions [B, Hkv,
        N], to which `rotary` has turned the keys, if they are to be compared as they were before.
    Returns: [B, Hkv, N] fp32 (fp64 for fp64 keys); computed in that dtype, because bf16 cosines tie massively.
    Raises: FastKVError for an unknown anchor or distance.
    """
    check_keydiff(anchor, distance)
    check_shape("keydiff_scores", "keys", keys, (None, None, None, None))
    keys = keys.to(compute_dtype(keys))
    if rotary is not None and positions is not None:
        keys = rotary.unrotate(keys, positions)
    count: int | Tensor = keys.shape[2]
    if mask is not None:
        keys = torch.where(mask[..., None], keys, 0)  # a masked-out row may hold NaN
        count = mask.sum(-1).clamp(min=1)[..., None]
    norms = torch.linalg.vector_norm(keys, dim=-1).clamp(min=EPSILON)
    if anchor in ("mean", "median"):
        total = keys.sum(2)
    else:
        total = ((1 / norms)[:, :, None] @ keys)[:, :, 0]
    if anchor == "pairwise":
        # The sum of cosines with every key is the cosine with their sum: no N x N matrix is needed.
        return -dots(keys, total) / norms
    center = total / count
    if anchor == "median":
        real = keys if mask is None else torch.where(mask[..., None], keys, torch.nan)
        center = real.nanmedian(2).values.nan_to_num(0.0)
    if distance == "cosine":
        return -dots(keys, F.normalize(center, dim=-1)) / norms
    if distance == "dot":
        return -dots(keys, center)
    return (keys - center[:, :, None]).norm(dim=-1)


def dots(keys: Tensor, one: Tensor) -> Tensor:
    """k . one for all keys [B, Hkv, N, D] and one vector [B, Hkv, D] of each head: [B, Hkv, N]."""
    return (one[:, :, None] @ keys.transpose(-1, -2))[:, :, 0]  # three times as fast as with the vector on the right


def window_attention(
    q: Tensor,
    keys: Tensor,
    scale: float,
    softcap: float | None = None,
    *,
    visible: Tensor | None = None,
    query_valid: Tensor | None = None,
    log_mass: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Mean attention weight that W queries give each key: the common signal of SnapKV and MomentKV.

    Args:
        q: [B, Hq, W, D].  keys: [B, Hkv, N, D].  visible: [B, Hkv, W, N] bool, which key each query may see.
        query_valid: [B, W] bool; the mean runs over valid queries only, which see something (zeros if there is none).
        log_mass: [B, Hq, W], log of the mass that also enters the denominator (the evicted tokens').
        bias: [B, Hkv, N], addends of the logits.
    Returns: [B, Hkv, N], mean over the queries of a group and over valid queries.
    """
    batch, num_heads, num, dim = q.shape
    heads, length = keys.shape[1:3]
    groups = check_groups("window_attention", num_heads, heads)
    check_shape("window_attention", "keys", keys, (batch, heads, length, dim))
    logits = grouped_logits(q, keys, scale, softcap, bias)
    if visible is not None:
        # A number, not -inf: queries of padding may see nothing, and get weights that can be left out.
        logits.masked_fill_(~visible[:, :, None], torch.finfo(logits.dtype).min)
    weights = logits.softmax(-1)
    real = weights.new_ones(batch, num) if query_valid is None else query_valid.to(weights.dtype)
    share = (real / (groups * real.sum(-1, keepdim=True).clamp(min=1)))[:, None, None].expand(weights.shape[:4])
    if log_mass is not None:
        lse = logits.amax(-1) - weights.amax(-1).log()  # the largest weight is exp(top - lse)
        share = share * torch.sigmoid(lse - log_mass.to(lse.dtype).reshape(lse.shape))
    return (share.flatten(2)[:, :, None] @ weights.flatten(2, 3))[:, :, 0]


def window_scores(q: Tensor, keys: Tensor, scale: float, pool: int = 7) -> Tensor:
    """Attention that the last W queries put on the keys before them, pooled (SnapKV, arXiv:2404.14469).

    s[b, h, n] = mean over group and window of softmax(scale * q . k)[n], then average pooling over `pool` neighbours.

    Args: q [B, Hq, W, D] post-RoPE; keys [B, Hkv, N, D] post-RoPE, all of them visible; pool: odd width.
    Returns: [B, Hkv, N] fp32 (fp64 for fp64 inputs).  Raises: FastKVError if Hq % Hkv or if pool is even.
    """
    return pool_scores(window_attention(q, keys, scale), pool)


def observed_attention(
    q: Tensor,
    keys: Tensor,
    positions: Tensor,
    valid: Tensor,
    scale: float,
    softcap: float | None = None,
    *,
    window: int | None = None,
    log_mass: Tensor | None = None,
    sink_logits: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mean attention weight that the last `window` real queries of a block give every candidate, and how many they are.

    A query sees the candidates up to its own position. Beside them its softmax has what `log_mass` and `sink_logits`
    say.

    Args: q [B, Hq, T, D], of the last T of N candidates; keys [B, Hkv, N, D]; positions, valid [B, Hkv, N], of which
        the first head's count for the block; window: None for all queries; log_mass [B, Hq, T], of the evicted tokens;
        sink_logits [Hq]; bias [B, Hkv, N], addends of the logits.
    Returns: [B, Hkv, N] and [B, 1, 1] fp32 (fp64 for fp64 inputs).
    """
    num, length = q.shape[2], keys.shape[2]
    real, places = (part[:, 0, length - num :] for part in (valid, positions))
    mass = log_mass
    if sink_logits is not None:
        sinks = sink_logits[:, None].expand(q.shape[:3]).to(compute_dtype(q))
        mass = sinks if mass is None else torch.logaddexp(mass, sinks)
    if window is not None and window < num:
        # Each row's own last tokens, on whichever side it is padded.
        last = real.to(torch.uint8).argsort(dim=-1, stable=True)[:, -window:]
        q = q.gather(2, last[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3]))
        mass = None if mass is None else mass.gather(2, last[:, None].expand(-1, q.shape[1], -1))
        real, places = real.gather(1, last), places.gather(1, last)
    received = queried = keys.new_zeros((), dtype=torch.float32)
    for start in range(0, q.shape[2], WATCHED):
        some = slice(start, start + WATCHED)
        mean = window_attention(
            q[:, :, some],
            keys,
            scale,
            softcap,
            visible=valid[:, :, None] & (positions[:, :, None] <= places[:, None, some, None]),
            query_valid=real[:, some],
            log_mass=None if mass is None else mass[:, :, some].contiguous(),
            bias=bias,
        )
        asked = real[:, some].sum(-1)[:, None, None].to(mean.dtype)
        received, queried = received + mean * asked, queried + asked
    return received / queried.clamp(min=1), queried


def position_order(positions: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Order of the tokens by position, invalid ones last, and its inverse; both [B, Hkv, N]."""
    order = in_order(positions, valid)
    return order, order.argsort(dim=-1)


def check_pool(pool: int) -> None:
    """Raise FastKVError unless `pool` is an odd width."""
    if pool < 1 or pool % 2 == 0:
        raise FastKVError(f"pool must be an odd width of at least 1, got {pool}; the field's values are 5 and 7")


def pool_scores(scores: Tensor, pool: int, positions: Tensor | None = None, valid: Tensor | None = None) -> Tensor:
    """Average pooling of width `pool` over neighbours in position order, zero beyond the ends.

    Args: scores [B, Hkv, N]; positions [B, Hkv, N] and valid [B, Hkv, N] where tokens are not already in order.
    """
    check_pool(pool)
    if pool == 1:
        return scores.clone()
    if positions is None or valid is None:
        return F.avg_pool1d(scores, pool, stride=1, padding=pool // 2)
    order, inverse = position_order(positions, valid)
    ordered = torch.where(valid, scores, 0).gather(-1, order)
    return F.avg_pool1d(ordered, pool, stride=1, padding=pool // 2).gather(-1, inverse)


def chunk_mean(scores: Tensor, chunk: int, positions: Tensor, valid: Tensor) -> Tensor:
    """Mean score of the tokens with equal `position // chunk`, given to each of them (MomentKV Sec. 5.1: chunks of 4).

    Args: scores, positions, valid [B, Hkv, N].  Returns: [B, Hkv, N]; 0 where not valid.
    """
    if chunk == 1:
        return scores.clone()
    order, inverse = position_order(positions, valid)
    label = torch.where(valid, positions // chunk, -1).gather(-1, order)
    starts = F.pad(label[..., 1:] != label[..., :-1], (1, 0))
    segment = starts.cumsum(-1)
    inside = valid.gather(-1, order)
    ordered = torch.where(inside, scores.gather(-1, order), 0)
    total = torch.zeros_like(ordered).scatter_add_(-1, segment, ordered)
    count = torch.zeros_like(ordered).scatter_add_(-1, segment, inside.to(ordered.dtype))
    return (total / count.clamp(min=1)).gather(-1, segment).gather(-1, inverse)


def random_scores(positions: Tensor, seed: int = 0, stream: int = 0, first: int = 0) -> Tensor:
    """A uniform number in [0, 1) per (head, position), the same whenever and in whatever batch it is asked for.

    A counter-based hash (two rounds of multiply and xor-shift, in int64) instead of a generator: eviction in blocks, in
    decode and in one shot then agree, and a row does not depend on its neighbours.

    Args: positions [B, Hkv, N] int; seed; stream: a further counter, such as the layer index; first: number of the
        first head, where other processes have those before it.
    Returns: [B, Hkv, N] fp32, 24 random bits each.
    """
    head = first + torch.arange(positions.shape[1], device=positions.device, dtype=torch.int64)[:, None]
    state = (
        positions.to(torch.int64) * 0x9E3779B1 + head * 0x85EBCA77 + (seed * 0xC2B2AE3D + stream * 0x27D4EB2F) % 2**32
    )
    for multiplier in (0x2C1B3C6D, 0x297A2D39):
        state = state & 0xFFFFFFFF
        state = ((state ^ (state >> 15)) * multiplier) & 0xFFFFFFFF
        state = state ^ (state >> 13)
    return (state >> 8).to(torch.float32) / 2**24


def neighbour_mean(scores: Tensor, pool: int, positions: Tensor, valid: Tensor) -> Tensor:
    """Mean over the up to `pool` real neighbours in position order, the token itself in the middle.

    Unlike `pool_scores`, what lies beyond the ends is left out instead of counted as zero: the mean of equal scores is
    that score everywhere, so neither the end of the text nor the edge of the padding is favoured or punished.

    Args: scores [B, Hkv, N]; pool: odd width; positions, valid [B, Hkv, N].
    Returns: [B, Hkv, N], 0 where not valid.  Raises: FastKVError if pool is even.
    """
    check_pool(pool)
    both = torch.stack([scores.masked_fill(~valid, 0), valid.to(scores.dtype)])
    if pool > 1:
        order, inverse = (index.expand_as(both) for index in position_order(positions, valid))
        pooled = F.avg_pool1d(both.gather(-1, order).flatten(0, 1), pool, stride=1, padding=pool // 2)
        both = pooled.view_as(both).gather(-1, inverse)
    total, share = both  # of the width that is real: at least 1 / pool for a real token
    return (total / share.masked_fill(~valid, 1)).masked_fill(~valid, 0)


def z_scores(scores: Tensor, mask: Tensor) -> Tensor:
    """(s - mean) / std over the real tokens of each head of each sequence (Compactor, arXiv:2507.08143, Eq. 6).

    Scores that differ by less than a thousandth of their mean (by std) are taken as equal, and equal scores get 0: that
    is below what half-precision keys can tell, and noise must not be blown up to unit variance. A single token gets 0.

    Args: scores [..., B, Hkv, N], any number of them; mask [B, Hkv, N] bool, true for real tokens.
    Returns: in the shape of the scores, 0 where not real; std is that of a population.
    """
    count = mask.sum(-1, keepdim=True).clamp(min=1)
    mean = torch.where(mask, scores, 0).sum(-1, keepdim=True) / count
    offset = torch.where(mask, scores - mean, 0)
    std = (offset.square().sum(-1, keepdim=True) / count).sqrt()
    flat = std <= 1e-3 * mean.abs()
    return torch.where(flat, 0, offset / torch.where(flat, 1, std))


def queries_ahead(
    queries: Tensor, positions: Tensor, valid: Tensor, rotary: Rotary, horizon: int, sinks: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What queries to come are like, if they are like those of a block: mean and covariance before the rotary
    embedding, turned by its mean over the `horizon` positions to come.

    Args: queries [B, Hq, T, D] post-RoPE, of the last T of N candidates; positions, valid [B, Hkv, N], of which the
        first head's count for the block; sinks: positions whose queries are left out.
    Returns: mean [B, Hq, 1, D], covariance [B, Hq, D, D] in fp32, and from how many queries, [B, 1, 1] int64.
    """
    places, real = (part[:, :1, -queries.shape[2] :] for part in (positions, valid))
    newest = torch.where(real, places, -1).amax((1, 2), keepdim=True)
    real = real & (places >= sinks)
    count = real.sum(-1, keepdim=True)
    queries = rotary.unrotate(queries.to(compute_dtype(queries)), places)
    number = count[..., None].clamp(min=1)
    queries.masked_fill_(~real[..., None], 0)  # in place, like the rest: a large copy of our own
    mean = queries.sum(2, keepdim=True) / number
    offset = queries.sub_(mean).mul_(real[..., None].to(mean.dtype))
    covariance = offset.transpose(-1, -2) @ offset / number
    ahead = rotary.turn_ahead(newest, torch.arange(1, horizon + 1, device=newest.device))
    return *turned_ahead(mean, covariance, rotary, ahead), count


def turned_ahead(
    mean: Tensor, covariance: Tensor, rotary: Rotary, turn: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Of `queries_ahead`: mean [B, Hq, 1, D] and covariance [B, Hq, D, D] after the mean rotation `turn`, as of
    `Rotary.turn_ahead`.
    """
    half = rotary.turned(covariance, *turn)  # C is symmetric, so R C R^T = (R (R C)^T)^T
    return rotary.turned(mean, *turn), rotary.turned(half.transpose(-1, -2), *turn)


def expected_attention(
    keys: Tensor,
    values: Tensor,
    mean: Tensor,
    covariance: Tensor,
    count: Tensor,
    scale: float,
    epsilon: float,
    memory: Tensor,
    *,
    valid: Tensor,
) -> Tensor:
    """What queries are expected to give each key, if they are Gaussian (Expected Attention, Devoto et al. 2025,
    arXiv:2510.00636, Sec. 3).

    (attention_i + epsilon) |v_i|, attention_i = mean over the group of softmax_i(s m.k_i + s^2 k_i.C k_i / 2), s the
    scale: the closed form of E exp(s q.k_i) for q of mean m and covariance C.

    Args: keys [B, Hkv, N, D] post-RoPE; values [B, Hkv, N, Dv]; mean [B, Hq, 1, D], covariance [B, Hq, D, D] and count
        [B, 1, 1] as of `queries_ahead`; memory [B, Hkv, N]: what was expected before; valid [B, Hkv, N] bool.
    Returns: [B, Hkv, N] fp32, positive; what was expected before where not valid, and in rows whose count is 0.
    Raises: FastKVError if Hq is not a multiple of Hkv.
    """
    groups = check_groups("expected_attention", mean.shape[1], keys.shape[1])
    keys = torch.where(valid[..., None], keys.to(mean.dtype), 0)
    attention = torch.zeros_like(keys[..., 0])
    for member in range(groups):
        centre, spread = mean[:, member::groups], covariance[:, member::groups] * scale / 2
        logits = scale * (keys @ spread).add_(centre).mul_(keys).sum(-1)
        attention += masked_softmax(logits, valid)[0] / groups
    known = (attention + epsilon) * torch.linalg.vector_norm(values.to(attention.dtype), dim=-1)
    return torch.where(valid & (count > 0), known.float().clamp(min=TINY), memory)


def known_or_mean(memory: Tensor, valid: Tensor, logs: bool = False) -> Tensor:
    """What is remembered of each candidate, [B, Hkv, N], or its log; where that is 0, the mean of the head's others."""
    known = valid & (memory > 0)
    score = torch.where(known, memory.log() if logs else memory, 0)
    mean = score.sum(-1, keepdim=True) / known.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(known, score, mean)


def needed_scores(unlike: Tensor, expected: Tensor | None, reread: Tensor | None, valid: Tensor) -> Tensor:
    """z(unlike) + z(log expected) + z(reread): the sum of what says that a token may be needed; 0 is nothing known, and
    counts as the mean of the head's others.

    Args: all [B, Hkv, N]. unlike: any scores; expected, reread: at least 0, or None.
    Returns: [B, Hkv, N] fp32, 0 where not valid.
    """
    reasons = [unlike]
    if expected is not None:
        reasons.append(known_or_mean(expected, valid, logs=True))
    if reread is not None:
        reasons.append(known_or_mean(reread, valid))
    score, *others = z_scores(torch.stack(reasons), valid)
    for other in others:
        score = score + other
    return score


SCRATCH = 1 << 24  # numbers per intermediate result: 64 MiB in float32


def output_norms(values: Tensor, output: Tensor) -> Tensor:
    """How much each value moves the layer's output: |W_o v|_1 (CriticalKV, arXiv:2502.03805).

    norm[b, h, n] = mean over the group's query heads i of |W_o[:, i] v[b, h, n]|_1.

    Args: values [B, Hkv, N, Dv]; output [hidden, Hq, Dv], the output projection by query head.
    Returns: [B, Hkv, N] fp32 (fp64 for fp64 values).  Raises: FastKVError if Hq % Hkv or shapes disagree.
    """
    batch, heads, num, dim = values.shape
    hidden, num_heads = output.shape[:2]
    groups = check_groups("output_norms", num_heads, heads)
    check_shape("output_norms", "output", output, (hidden, num_heads, dim))
    dtype = compute_dtype(values)
    norms = torch.zeros(batch, heads, num, dtype=dtype, device=values.device)
    step = max(SCRATCH // (batch * heads * hidden), 1)
    for member in range(groups):
        weight = output[:, member::groups].to(dtype)
        for start in range(0, num, step):
            part = slice(start, start + step)
            moved = torch.einsum("bhnd,ohd->bhno", values[:, :, part].to(dtype), weight)
            norms[:, :, part] += moved.abs_().sum(-1)
    return norms / groups
