"""Centroids of the evicted tokens: a few weighted pairs, kept apart where one mean of all would blur them.

Let the evicted set E be split into parts c of n_c tokens with means k_c, v_c and mean squared deviation sigma_c^2 of a
key coordinate. The mass of every part is estimated, and they add up:

    logit   b_c   = log n_c + scale q.k_c + log cosh(scale |q| sigma_c)
    mass    log Z = logsumexp_c b_c
    value   f(q)  = sum_c softmax(b)_c v_c

Without its last term this is Jensen's bound, that of `moments`, which knows nothing of how far the logits lie apart.
With logits s_mean + delta_j and v = mean_j delta_j^2: if a part is symmetric about its mean, every delta comes with its
negative, so exp(delta) may be replaced by cosh(sqrt(delta^2)); cosh(sqrt(x)) is convex in x (its power series has
positive coefficients only), and Jensen's inequality for x = delta^2 gives log n + s_mean + log cosh(sqrt(v)), which is
exact for two opposite keys. v is taken as scale^2 |q|^2 sigma_c^2, as if keys varied alike in all directions; then, and
for parts that are not symmetric, it is an approximation, no bound: a query that does not read where they vary gets more
than the true mass.

So a centroid is a slot whose logit has a bias. Parts of one token are exact.
The tighter the parts, the smaller both errors, so parts are joined where the sum of squares within parts grows least
(Ward 1963). Joining a and b costs

    n_a n_b / (n_a + n_b) * (|k_a - k_b|^2 / var_k + |v_a - v_b|^2 / var_v)

with the variances of all centroids. The exact rule joins the cheapest pair, one pair after the other. Here half of the
centroids, every second one in order of age, each choose their cheapest partner in the other half, and the cheapest of
these pairs are joined together (the bipartite matching of token merging, Bolya et al. 2023, arXiv:2210.09461): in each
round a fourth of the centroids disappears, in the last ones an eighth. A round has static shapes and no data-dependent
loop; the halves swap after every round. How many pairs a head joins in a round follows from how many centroids it has
in use, so that a head does not depend on what others evict, nor on padding.

Many tokens first become fewer among themselves: SEEDS of them, or ROOMY for each centroid, evenly spread by age, are
seeds, and every other one joins the nearest, by the sum of squares above with the variances of the seeds. Then seeds
become the means of what joined them, and every other token chooses once more (Lloyd 1982). What is compared grows with
the number of tokens, not with its square.

Means may be stored in bf16: twice as many centroids in the same bytes say more than eight bits more of each. They are
joined in fp32 and rounded when a block of tokens has joined. A token moves the mean of n by 1 / n of its distance, soon
less than half of the last bit; rounded to the nearest number a mean would stop there for good, however far its later
tokens lie. So what is rounded away is carried on in time: bits below the last one round up where they exceed a
threshold that runs through all of [0, 1) as the part grows (Weyl's sequence, evenly spread after any number of steps),

    t(n, d) = frac(n STEP / 2^32 + d TURN / 2^32)      of the part's n tokens and coordinate d

and a mean that should move by a tenth of the last bit moves by one bit at every tenth step. A number that bf16 has
already is never changed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import FastKVError, check_groups, check_shape
from .gather import added_at, rows_at
from .moments import Evicted, compute_dtype

BLOCK = 2048  # evicted tokens that join at once: bounds what there is on the way
SEEDS, ROOMY = 256, 2  # parts of a block that join the centroids: so many, or so many for each centroid
CHOICES = 2  # how often a token of it chooses its part
# At most one centroid in so many disappears in a round, of more than SETTLED in use and of fewer. The last rounds join
# what has been joined, and decide more; the closer to the exact rule, the better.
MEDIUM, FINE, SETTLED = 4, 8, 288
STEP, TURN = 0x61C88647, 0x6A09E667  # 2^32 times 1 - 1 / golden ratio and sqrt(2) - 1: far from fractions


def few_enough(num: int) -> int:
    """The most parts of a block's tokens that join `num` centroids."""
    return max(SEEDS, ROOMY * num)


def left_of(used: int, num: int) -> int:
    """The most centroids that a head with at most `used` has after a round on the way to `num`.

    Where rounds become finer, a head with fewer in use may have more of them afterwards.
    """

    def left(used: int) -> int:
        return max(num, used - max(used // (FINE if used <= SETTLED else MEDIUM), 1))

    return max(left(used), left(min(used, SETTLED)))


@dataclass
class Centroids(Evicted):
    """At most M weighted pairs per sequence and KV head that stand for a set of tokens, oldest first.

    Attributes:
        count: [B, Hkv, M] fp32, tokens in each part; 0 for an unused centroid.
        keys: [B, Hkv, M, Dk] and values: [B, Hkv, M, Dv], the means, fp32 or bf16; zero where unused.
        spread: [B, Hkv, M] fp32, sum over the tokens of the mean of (k - k_c)^2 over the Dk coordinates.
    Or all of them in float64.
    """

    count: Tensor
    keys: Tensor
    values: Tensor
    spread: Tensor

    @classmethod
    def empty(
        cls,
        batch: int,
        num_kv_heads: int,
        num: int,
        key_dim: int,
        value_dim: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Centroids:
        """`num` unused centroids with means in `dtype`. Raises: FastKVError unless num >= 1."""
        if num < 1:
            raise FastKVError(f"Centroids need at least 1 per head, got {num}; use no correction instead of none")
        place, exact = (batch, num_kv_heads, num), torch.promote_types(dtype, torch.float32)
        count, spread = (torch.zeros(place, dtype=exact, device=device) for _ in range(2))
        keys, values = (torch.zeros(*place, dim, dtype=dtype, device=device) for dim in (key_dim, value_dim))
        return cls(count, keys, values, spread)

    @property
    def num(self) -> int:
        """M."""
        return self.count.shape[-1]

    def add(self, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Centroids:
        """Centroids, as many as there are, of this set and the given pairs together; the order of pairs matters.

        Of every BLOCK pairs those that are left of `thinned` line up behind the centroids, and then join them round by
        round. The last round of a block rounds the means to the dtype in which they came.
        """
        batch, heads, num = self.count.shape
        check_shape("Centroids.add", "keys", keys, (batch, heads, None, self.keys.shape[-1]))
        check_shape("Centroids.add", "values", values, (batch, heads, keys.shape[2], self.values.shape[-1]))
        if mask is None:
            mask = torch.ones(keys.shape[:3], dtype=torch.bool, device=keys.device)
        check_shape("Centroids.add", "mask", mask, keys.shape[:3])
        total, dtype = self, self.count.dtype
        for start in range(0, keys.shape[2], BLOCK):
            part = slice(start, start + BLOCK)
            inside = mask[:, :, part]
            # where, not multiply: a masked-out row may hold NaN.
            new_keys = torch.where(inside[..., None], keys[:, :, part].to(dtype), 0)
            new_values = torch.where(inside[..., None], values[:, :, part].to(dtype), 0)
            count = inside.to(dtype)
            new = Centroids(count, new_keys, new_values, torch.zeros_like(count))
            few = new.at(new.order()).thinned(few_enough(num)).tensors()
            total = Centroids(*(torch.cat((old.to(dtype), rows), 2) for old, rows in zip(total.tensors(), few)))
            total = total.at(total.order())
            used, half = (total.count > 0).sum(-1), 0
            while total.num > num:
                share = torch.where(used <= SETTLED, FINE, MEDIUM)
                joins = torch.minimum(used - num, (used // share).clamp(min=1)).clamp(min=0)
                left = left_of(total.num, num)
                total = total.joined(total.targets(joins, half))
                total = total.at(total.order(left))
                used, half = used - joins, 1 - half
            total = total.rounded(self.keys.dtype)
        return total

    def thinned(self, most: int) -> Centroids:
        """The same tokens; heads with more than `most` have them in so many parts. Used ones must come first."""
        if self.num <= most:
            return self
        used = (self.count > 0).sum(-1, keepdim=True)
        places = torch.arange(self.num, device=used.device).expand(self.count.shape)
        seeds = places[..., :most] * used // most
        points = self.points(torch.zeros_like(self.count).scatter(-1, seeds, 1))
        means, target = points, places
        for _ in range(CHOICES):
            own = rows_at(means, seeds)
            far = own.square().sum(-1)[..., None, :] - 2 * points @ own.transpose(-1, -2)
            target = seeds.gather(-1, far.argmin(-1)).scatter(-1, seeds, seeds)
            target = torch.where(places < used, target, places)
            means = added_at(points, target) / added_at(self.count, target).clamp(min=1)[..., None]
        joined = self.joined(target)
        return joined.at(joined.order(most))

    def check(self, op: str, batch: int, heads: int, dim: int, value_dim: int) -> None:
        """As `Evicted` says."""
        for name, size in {"count": (), "keys": (dim,), "values": (value_dim,), "spread": ()}.items():
            check_shape(op, name, getattr(self, name), (batch, heads, self.num, *size))

    def targets(self, joins: Tensor, half: int) -> Tensor:
        """The cheapest merges of one half into the other: [B, Hkv, M], whom each joins, most of them themselves.

        Used centroids must come first.

        Args: joins [B, Hkv] int, how many merges; at most half of the used centroids (rounded down) can disappear.
            half: 0 if the first, third, ... centroid may disappear, 1 if the second, fourth, ...
        """
        least, partner = self.costs(half).min(-1)
        rank = least.argsort(dim=-1, stable=True).argsort(dim=-1)  # of unused ones, which cost inf, last
        places = torch.arange(self.num, device=rank.device)
        gone = torch.where(rank < joins[..., None], places[1 - half :: 2][partner], places[half::2])
        target = places.expand(self.count.shape).clone()
        target[..., half::2] = gone
        return target

    def joined(self, target: Tensor) -> Centroids:
        """The same tokens in fewer parts: centroid m becomes a part of centroid target[..., m], as `targets` says."""
        count = added_at(self.count, target)
        weight = (self.count / rows_at(count, target).clamp(min=1))[..., None]
        keys, values = added_at(weight * self.keys, target), added_at(weight * self.values, target)
        moved = self.keys - rows_at(keys, target)
        return Centroids(count, keys, values, added_at(self.spread + self.count * moved.square().mean(-1), target))

    def rounded(self, dtype: torch.dtype) -> Centroids:
        """With means in `dtype`; to bf16 as the equation above says, others to the nearest."""
        if dtype != torch.bfloat16:
            return Centroids(self.count, self.keys.to(dtype), self.values.to(dtype), self.spread)
        steps = self.count.long()[..., None] * STEP

        def up_or_down(means: Tensor) -> Tensor:
            turns = torch.arange(means.shape[-1], device=means.device) * TURN
            threshold = ((steps + turns) >> 16 & 0xFFFF).int()
            # The bits of a bf16 are the first 16 of an fp32, and what is rounded away are the others.
            return ((means.float().view(torch.int32) + threshold) >> 16).to(torch.int16).view(torch.bfloat16)

        return Centroids(self.count, up_or_down(self.keys), up_or_down(self.values), self.spread)

    def order(self, num: int | None = None) -> Tensor:
        """Places of the first `num` of them (default all), used ones before unused ones: [B, Hkv, num]."""
        return (self.count == 0).to(torch.uint8).argsort(dim=-1, stable=True)[..., :num]

    def at(self, order: Tensor) -> Centroids:
        """Those at places [B, Hkv, num]."""
        return Centroids(*(rows_at(rows, order) for rows in self.tensors()))

    def estimate(self, q: Tensor, scale: float, softcap: float | None = None) -> tuple[Tensor, Tensor]:
        """`centroid_estimate` with the cosh mass."""
        return centroid_estimate(q, self, scale, softcap)

    def costs(self, half: int) -> Tensor:
        """[B, Hkv, movers, partners], what a merge adds to the weighted sum of squares within parts; inf if unused.

        Movers are the first, third, ... centroid if half is 0, and partners the others; the other way round if it is 1.
        """
        points, unused = self.points(self.count), self.count == 0
        squares = points.square().sum(-1).masked_fill(unused, float("inf"))
        share = 1 / self.count.masked_fill(unused, 1)
        movers, partners = slice(half, None, 2), slice(1 - half, None, 2)
        cost = (-2 * points[:, :, movers]) @ points[:, :, partners].transpose(-1, -2)
        # In place: this is the largest table there is.
        distance = cost.add_(squares[..., movers, None]).add_(squares[..., None, partners]).clamp_(min=0)
        return distance.div_(share[..., movers, None] + share[..., None, partners])

    def points(self, weight: Tensor) -> Tensor:
        """Keys and values side by side, away from their weighted means, in units of their weighted deviations."""
        total = weight.sum(-1).clamp(min=1)[..., None, None]
        parts = []
        for rows in (self.keys, self.values):
            away = rows - (weight[..., None] * rows).sum(2, keepdim=True) / total
            variance = (weight[..., None] * away.square()).sum((2, 3))[..., None, None] / total
            parts.append(away * (1 / variance.clamp(min=torch.finfo(rows.dtype).tiny)).sqrt())
        return torch.cat(parts, -1)


def centroid_estimate(
    q: Tensor, centroids: Centroids, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """What attention over the set would return, and how much mass it would carry.

    With softcap c the logit of a part is c tanh(x / c), and its deviation is multiplied by 1 - tanh^2(x / c).

    Args: q [B, Hq, T, D] post-RoPE; centroids of Hkv heads; scale: logit multiplier.
    Returns: value [B, Hq, T, Dv] (zero for an empty set) and log_mass [B, Hq, T] (-inf for an empty set).
    Raises: FastKVError if Hq is not a multiple of Hkv.
    """
    batch, num_heads, num, dim = q.shape
    heads = centroids.count.shape[1]
    check_groups("centroid_estimate", num_heads, heads)
    dtype = torch.promote_types(compute_dtype(q), centroids.keys.dtype)
    keys, values = (means.flatten(0, 1).to(dtype) for means in (centroids.keys, centroids.values))
    count, spread = (part.reshape(len(keys), 1, -1).to(dtype) for part in (centroids.count, centroids.spread))
    rows = q.to(dtype).reshape(len(keys), -1, dim)
    logit = torch.bmm(rows * scale, keys.transpose(1, 2))
    sigma = (spread / count.clamp(min=1)).sqrt()
    deviation = torch.linalg.vector_norm(rows, dim=-1, keepdim=True) * (abs(scale) * sigma)
    if softcap is not None:
        bent = torch.tanh(logit / softcap)
        logit, deviation = softcap * bent, deviation * (1 - bent * bent)
    # log n + log cosh x = log(n / 2) + x + log(1 + e^-2x), x >= 0. In operators of one argument: those of two compute
    # the last numbers of a tensor in another way than vectors of them.
    logit += (count / 2).log()  # -inf for an unused centroid
    logit += (-2 * deviation).exp_().log1p_()
    logit += deviation
    log_mass = logit.logsumexp(-1, keepdim=True)
    value = torch.bmm(torch.exp(logit - log_mass.clamp(min=torch.finfo(dtype).min)), values)
    return value.reshape(batch, num_heads, num, -1), log_mass.reshape(batch, num_heads, num)
