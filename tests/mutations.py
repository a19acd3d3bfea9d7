"""Seeded bugs, and whether the tests that should notice them do: `python -m tests.mutations`.

Each bug is one replacement in a temporary copy of the package; the working tree is never touched. The named tests first
run on the unchanged copy, because a test that fails anyway notices nothing. They draw no more examples than `make test`
does, and none of them is slow: what is caught here is caught every day. Exits with 1 if a bug survives or the text that
it replaces is gone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import queue
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COPIED = ("fastkv", "tests", "perf", "tools", "docs", "pyproject.toml", "README.md")
SECONDS = 600
OPTIONS = ("-x", "-q", "-o", "timeout=0", "--no-header", "-m", "not slow", "--hypothesis-profile=mutations")

# Every run is forked from a process that has imported the slow packages, none of which the bugs are in.
PROCESSES = multiprocessing.get_context("forkserver")
PRELOADED = ["torch", "torch._dynamo", "hypothesis.stateful", "pytest", "transformers", "transformers.modeling_utils"]


@dataclass(frozen=True)
class Mutation:
    """A bug: `original`, which occurs once in fastkv/`file`, becomes `replacement`; `tests` should fail."""

    what: str
    file: str
    original: str
    replacement: str
    tests: tuple[str, ...]

    def apply(self, root: Path) -> str:
        """Change the file under `root`; returns its text before. ValueError unless the original is there once."""
        path = root / "fastkv" / self.file
        text = path.read_text()
        if text.count(self.original) != 1:
            raise ValueError(f"fastkv/{self.file} has {text.count(self.original)} times {self.original!r}")
        path.write_text(text.replace(self.original, self.replacement))
        return text


def bug(what: str, file: str, original: str, replacement: str, *tests: str) -> Mutation:
    return Mutation(what, file, original, replacement, tuple(f"tests/test_{test}" for test in tests))


COMPILED = "slots.py::test_compiled_"
HEADS = "head_shares.py"
MERGING = "properties.py::test_merging_is_counting_together"
DECODING = "properties.py::test_decoding_is_softmax_over_all_tokens"
BLOCK = "properties.py::test_a_block_is_softmax_over_its_past"
SELECT = "properties.py::test_select_keeps_the_best"
KEEP = "properties.py::test_a_layer_keeps_the_best"
COMPACT = "properties.py::test_compact_conserves_every_token"
EVICT = "properties.py::test_evict_conserves_every_token"
SHARES = "properties.py::test_layers_share_the_budget_exactly"
BYTES = "properties.py::test_bytes_are_never_exceeded"
CACHE = "cache_operations.py"
SLOTS = "slots.py"
PAGED = "paged.py"
GEOMETRY = "policies_geometry.py"
SERVING = "serving_batch.py"
PREFIXES = "serving_prefixes.py"
WARMUP = "warmup.py::test_after_a_warm_up_traffic_compiles_nothing"
PROMPTS = "kernels_prefill.py"
SEQUENCES = f"{CACHE}::test_any_sequence_of_operations"
ATTENTION = "policies_attention.py"
CENTROIDS = "reference_centroids.py"
JOINING = "kernels_remember.py::test_rounds_over_several_programs"
IN_PAGES = "rows.py::test_kernels_in_pages"
RACES = "races.py::test_any_order_gives_the_same_bits"
STATISTICS = "policies_statistics.py"
EQUATION = f"{STATISTICS}::test_the_equation"
FLOOR = "policy_matrix.py::test_every_head_keeps_a_fifth_of_the_mean"

MUTATIONS = [
    # Padding.
    bug(
        "a lone token of padding is decoded",
        "integrations/transformers/generate.py",
        "return mask is cache.known_mask or not ends_in_padding(mask)",
        "return True",
        "padding.py",
    ),
    bug(
        "what generate says of one mask holds for all",
        "integrations/transformers/generate.py",
        "return mask is cache.known_mask or",
        "return cache.known_mask is not None or",
        "padding.py",
    ),
    bug(
        "a block of one token is decoded",
        "integrations/transformers/layer.py",
        " and not self.cache.workspace.reading",
        "",
        "padding.py",
    ),
    # The specification.
    bug(
        "Chan's weight is n_b n_b / n",
        "reference/moments.py",
        "weight = self.count.to(",
        "weight = other.count.to(",
        MERGING,
    ),
    bug(
        "the merged mean is weighted by the wrong set",
        "reference/moments.py",
        "share = (other.count",
        "share = (self.count",
        MERGING,
    ),
    bug(
        "the mass of the evicted forgets their number",
        "reference/moments.py",
        "count.log() + logit",
        "logit",
        DECODING,
    ),
    bug(
        "the slope of a capped logit is 1 - tanh",
        "reference/moments.py",
        "1 - bent * bent",
        "1 - bent",
        DECODING,
    ),
    bug(
        "the residual adds the linear part",
        "reference/moments.py",
        "torch.baddbmm(*rows, alpha=-1)",
        "torch.baddbmm(*rows)",
        "reference_moments.py",
    ),
    bug(
        "a query does not see its own token",
        "reference/attention.py",
        "causal = index[:end] <= index",
        "causal = index[:end] < index",
        BLOCK,
    ),
    bug(
        "attention received is not shared with the evicted",
        "reference/attention.py",
        "(probs[:, :, :, 0] * share).mean(2)",
        "probs[:, :, :, 0].mean(2)",
        DECODING,
    ),
    bug(
        "a learned sink is forgotten in the merge",
        "reference/attention.py",
        "out, total = with_sink(out, total, None",
        "_ = with_sink(out, total, None",
        "sinks.py::test_a_step",
    ),
    bug(
        "attention received is not shared with the sink",
        "reference/attention.py",
        "out, total = with_sink(out, total, None",
        "out, _ = with_sink(out, total, None",
        "sinks.py::test_a_step",
    ),
    bug(
        "the second reading of a prompt has no sinks",
        "cache/wrappers.py",
        "out, lse = self._attend(q, k, v, valid, how)",
        "out, lse = self._attend(q, k, v, valid, how._replace(sink_logits=None))",
        "sinks.py::test_a_second_reading",
    ),
    bug(
        "sinks are saved with the state",
        "reference/state.py",
        " and one.name not in self.BORROWED",
        "",
        "sinks.py::test_sinks_belong_to_the_model_and_not_to_the_state",
    ),
    bug(
        "policies are told of attention without sinks",
        "cache/signals.py",
        "torch.logaddexp(mass, sinks)",
        "mass",
        "sinks.py::test_attention_that_policies_are_told_of",
    ),
    bug(
        "a full head stores into the next head's slot",
        "reference/attention.py",
        "free = slot < starts[:, 1:]",
        "free = slot <= starts[:, 1:]",
        "ragged_ops.py::test_a_full_head_stores_nothing",
    ),
    bug(
        "equal scores go to the higher position",
        "reference/selection.py",
        "torch.sub(positions, ascending",
        "torch.sub(-positions, ascending",
        SELECT,
    ),
    bug(
        "one recent token too few is protected",
        "reference/selection.py",
        "(positions >= first_recent)",
        "(positions > first_recent)",
        KEEP,
    ),
    bug(
        "padding enters the moments",
        "reference/selection.py",
        "evicted = valid & ~selection.kept",
        "evicted = ~selection.kept",
        COMPACT,
    ),
    bug(
        "unequal heads keep one token too many",
        "reference/selection.py",
        "(slots.starts.diff() - spec.spare).clamp(min=0)",
        "(slots.starts.diff() - spec.spare + 1).clamp(min=0)",
        EVICT,
    ),
    bug(
        "the anchor of keydiff counts empty slots",
        "reference/scores.py",
        "count = mask.sum(-1).clamp(min=1)[..., None]",
        "pass",
        "properties.py::test_keydiff_of_some_slots_is_that_of_their_tokens",
    ),
    bug(
        "knorm keeps long keys",
        "reference/scores.py",
        "return -torch.linalg.vector_norm(keys",
        "return torch.linalg.vector_norm(keys",
        "policies_geometry.py::test_score_and_kept_set_equal_brute_force",
        SEQUENCES,
    ),
    bug(
        "keys are turned on instead of back",
        "rotary.py",
        "self._turned(keys, cos / self.scaling, -sin / self.scaling)",
        "self._turned(keys, cos / self.scaling, sin / self.scaling)",
        "policies_geometry.py::test_keys_of_llama_are_unrotated",
    ),
    bug(
        "neighbours are turned back as halves",
        "rotary.py",
        "(turned[..., ::2], turned[..., 1::2]) if self.interleaved else turned.tensor_split(2, -1)",
        "turned.tensor_split(2, -1)",
        "selfcheck.py::test_keys_are_turned_back",
    ),
    bug(
        "an untested model may give other logits",
        "integrations/transformers/selfcheck.py",
        "if not worst <= limit:",
        "if not worst <= 1e9:",
        "selfcheck.py::test_an_untested_model_that_disagrees_is_refused",
    ),
    # Choosing and storing.
    bug("every head keeps three tenths", "cache/selection.py", "FLOOR = 0.2", "FLOOR = 0.3", FLOOR),
    bug("a head may keep nothing", "cache/selection.py", "FLOOR = 0.2", "FLOOR = 0.0", FLOOR),
    bug(
        "a policy's recent share is rounded down",
        "cache/layout.py",
        "math.ceil(config.policy.shares.recent",
        "math.floor(config.policy.shares.recent",
        KEEP,
    ),
    bug(
        "heads compete for one head's tokens",
        "cache/selection.py",
        "flat(first)), heads * tokens\n",
        "flat(first)), tokens\n",
        KEEP,
    ),
    bug(
        "between heads, equal scores go to the lower head first",
        "cache/selection.py",
        "place = positions * heads + torch.arange(heads, dtype=torch.int32, device=scores.device)[:, None]",
        "place = positions + 1024 * torch.arange(heads, dtype=torch.int32, device=scores.device)[:, None]",
        KEEP,
    ),
    bug(
        "slots that heads did not win are lost",
        "cache/compaction.py",
        "capacities = counts + left + ",
        "capacities = counts + ",
        SEQUENCES,
    ),
    bug(
        "what was remembered goes to another slot",
        "cache/compaction.py",
        "signals.memory.gather(-1, order).gather(-1, place)",
        "signals.memory.gather(-1, place)",
        f"{SEQUENCES}[remembering-uniform-none-5+3]",
    ),
    bug(
        "reset forgets to deal out the slots",
        "cache/layout.py",
        "            slots.deal(self.capacities(tier))",
        "            slots.filled = 0",
        SEQUENCES,
    ),
    bug(
        "values stay where the map errs least",
        "cache/key_only.py",
        "torch.where(without, -1.0, errors)",
        "torch.where(without, -1.0, 1 / (1 + errors))",
        "vector_cache.py::test_values_go_where_the_map_errs_least",
    ),
    # Time.
    bug(
        "positions of a block are one too high",
        "cache/prefill.py",
        "valid.cumsum(-1) - 1)",
        "valid.cumsum(-1))",
        SEQUENCES,
    ),
    bug(
        "padding is counted as seen", "cache/prefill.py", "state.seen += valid.sum(-1)", "state.seen += num", SEQUENCES
    ),
    bug(
        "queries of padding observe",
        "cache/signals.py",
        "query_valid=query_valid,",
        "query_valid=torch.ones_like(query_valid),",
        "bounds.py::test_a_padded_row_is_the_row_alone",
    ),
    bug(
        "recent tokens are unprotected while decoding",
        "cache/layout.py",
        "        recent=min(recent, layout.least - budget.sinks),\n",
        "        recent=0,\n",
        SEQUENCES,
    ),
    bug(
        "attention received is summed, not averaged, over the queries",
        "reference/selection.py",
        'attention = joined(*(slots["attention"] for slots in tiers)) / queried',
        'attention = joined(*(slots["attention"] for slots in tiers))',
        f"{CACHE}::test_attention_while_decoding_is_a_mean_over_the_queries_that_saw_the_token",
    ),
    # Slots of fewer bits.
    bug(
        "the zero point is left out of the codes",
        "reference/slots.py",
        "codes = ((groups / step).round() + zeros).clamp(0, 15)",
        "codes = (groups / step).round().clamp(0, 15)",
        f"{SLOTS}::test_four_bits_round_by_half_a_step_of_the_rotated_row",
    ),
    bug(
        "scales stay where a token was",
        "reference/state.py",
        'MOVING: ClassVar = ("keys", "values", "key_scales", "value_scales", "positions", "bias")',
        'MOVING: ClassVar = ("keys", "values", "positions", "bias")',
        f"{SLOTS}::test_moving_never_rounds",
    ),
    bug(
        "a new token has the bias of the token that left",
        "reference/state.py",
        'rest["bias"] = torch.zeros_like(positions, dtype=self.bias.dtype)',
        'rest["bias"] = self.bias[:, :, : positions.shape[2]].clone()',
        "bias.py::test_a_block_comes_with_no_bias",
    ),
    bug(
        "threads that should hold the same sum do not",
        "kernels/_attention.py",
        "return tl.sum(tl.fma(a, b, 0.0), 1)",
        "return tl.sum(a * b, 1)",
        "ptx.py::test_a_sample_of_executed_kernels",
    ),
    bug(
        "kernels add natural biases to base-2 logits",
        "kernels/_attention.py",
        "return tl.load(bias_ptr + slot, mask=inside, other=0.0) * LOG2E",
        "return tl.load(bias_ptr + slot, mask=inside, other=0.0)",
        "bias.py::test_a_step_counts_a_slot_as_often_as_its_bias_says",
    ),
    bug(
        "tokens that never leave are matched like the others",
        "cache/refit.py",
        'free = exact.valid & ~ops.protected(exact["positions"], state.seen, spec.sinks, spec.recent)',
        "free = exact.valid",
        "attention_matching.py::test_only_what_may_leave_gets_a_bias_and_another_value",
    ),
    bug(
        "a block is remembered as it is stored",
        "cache/compaction.py",
        "        ops.compact(signals.valid, selection, _newest(signals, num), state, rule.spec)\n",
        "        rows = state.exact.encoded(*_newest(signals, num))\n"
        "        coded = not state.exact.format.plain\n"
        '        k = state.exact.format.decode(rows["keys"], rows.get("key_scales"))\n'
        "        block = (k, *_newest(signals, num)[1:]) if coded else _newest(signals, num)\n"
        "        ops.compact(signals.valid, selection, block, state, rule.spec)\n",
        f"{SLOTS}::test_what_leaves_the_prompt_is_remembered_before_it_is_rounded",
    ),
    bug(
        "on a CPU results of rows that lie apart come back in another order",
        "cpu/operations.py",
        "whole.index_copy_(0, index, part.to(whole.dtype))",
        "whole.index_copy_(0, index.flip(0), part.to(whole.dtype))",
        "rows.py::test_a_cpu_s_steps_copy_no_rows",
    ),
    bug(
        "heads of a CPU step take the biases of their mirror images",
        "cpu/operations.py",
        "bias.view(batch, heads, 1, 1, slots)",
        "bias.flip(1).view(batch, heads, 1, 1, slots)",
        "bias.py::test_a_step_counts_a_slot_as_often_as_its_bias_says",
    ),
    # Budgets and plans.
    bug(
        "bytes forget what a layer costs apart from tokens",
        "budget.py",
        "left = room - self.fixed",
        "left = room",
        BYTES,
    ),
    bug("a share of the prompt is rounded down", "budget.py", "math.ceil(self.keep", "math.floor(self.keep", SHARES),
    bug(
        "the last layer of a pyramid gets a tenth",
        "budget.py",
        "PYRAMID_BETA = 20.0",
        "PYRAMID_BETA = 10.0",
        SHARES,
    ),
    bug(
        "moments are no more than the policy's score needs",
        "cache/layout.py",
        "order=max(orders, default=None)",
        "order=min(orders, default=None)",
        "policy_matrix.py::test_every_correction_conserves",
    ),
    # The cache.
    bug(
        "beams keep their old past",
        "integrations/transformers/cache.py",
        "t.index_select(0, beam_idx.to(t.device))",
        "t.index_select(0, beam_idx.to(t.device).sort().values)",
        SEQUENCES,
    ),
    bug(
        "repeated rows are interleaved wrongly",
        "integrations/transformers/cache.py",
        "t.repeat_interleave(repeats, 0)",
        "torch.cat([t] * repeats)",
        SEQUENCES,
    ),
    bug(
        "a roll-back drops the first tokens",
        "cache/wrappers.py",
        "kept = slice(0, num - drop)",
        "kept = slice(drop, num)",
        SEQUENCES,
    ),
    bug(
        "a clone shares the state",
        "cache/layer.py",
        "copy.deepcopy(self.state, {id(part): part for part in kept if part is not None})",
        "copy.copy(self.state)",
        SEQUENCES,
    ),
    bug(
        "the digest of a file is not compared",
        "integrations/transformers/serialization.py",
        "digest == _digest(words, file.tensors) and",
        "bool(digest) and",
        "saved.py::test_any_flipped_bit_is_noticed",
    ),
    bug(
        "lengths beyond the slots are accepted",
        "integrations/transformers/serialization.py",
        "((lengths < 0) | (lengths > rooms)).any()",
        "(lengths < 0).any()",
        f"{CACHE}::test_a_file_with_more_tokens_than_a_head_has_room_for_is_refused",
    ),
    # Policies.
    bug(
        "h2o adds means instead of sums",
        "policies/h2o.py",
        "signals.attention * signals.queried",
        "signals.attention",
        f"{ATTENTION}::test_h2o_in_blocks_equals_the_column_sums_of_the_whole_matrix",
    ),
    bug(
        "tova averages slots instead of tokens",
        "policies/snapkv.py",
        "weights = signals.attention.gather(-1, order)",
        "weights = signals.attention",
        f"{ATTENTION}::test_tova_is_the_mean_over_all_heads_and_keeps_the_same_tokens_in_each",
        f"{ATTENTION}::test_rows_padding_and_order_of_slots_do_not_matter",
    ),
    bug(
        "one program alone reads a head of 256 numbers in 4 bits",
        "kernels/decode_attention.py",
        "programs = max(programs, 2) if packed and padded > 128 else programs",
        "programs = max(programs, 1) if packed and padded > 128 else programs",
        "kernels_codes.py::test_no_program_alone_reads_a_wide_head_in_4_bits",
    ),
    bug(
        "snapkv pools while decoding",
        "policies/snapkv.py",
        "if signals.decoding:",
        "if False:",
        "properties.py::test_snapkv_pools_prompts_only",
    ),
    bug(
        "retrieval heads get a token more than the budget",
        "policies/duoattention.py",
        "(rank < left)",
        "(rank <= left)",
        f"{ATTENTION}::test_duoattention_shares_out_exactly_the_budget",
    ),
    bug(
        "compactor blends what it does not scale",
        "policies/compactor.py",
        "self.blend * z_scores(leverage, signals.valid)",
        "self.blend * leverage",
        "policies_geometry.py::test_score_and_kept_set_equal_brute_force",
    ),
    bug(
        "heads choose for themselves although a map reads the keys of all",
        "cache/selection.py",
        "scores = z_scores(scores, signals.valid).mean(1, keepdim=True).repeat(1, scores.shape[1], 1)",
        "pass",
        "vector_cache.py::test_with_a_joint_map_all_heads_keep_the_same_tokens",
    ),
    bug(
        "a head drops the values that it alone can spare",
        "cache/selection.py",
        "errors = errors.sum(1, keepdim=True).repeat(1, errors.shape[1], 1)",
        "pass",
        "vector_cache.py::test_with_a_joint_map_all_heads_keep_the_same_tokens",
    ),
    bug(
        "keys of all heads stand side by side in another order",
        "reference/attention.py",
        "keys = keys.transpose(1, 2).flatten(2)[:, None]",
        "keys = keys.flip(1).transpose(1, 2).flatten(2)[:, None]",
        "vector_cache.py::test_a_token_without_value_attends_with_what_the_map_makes_of_its_key",
    ),
    bug(
        "a joint map is dealt to the heads by rows",
        "lab/fit_vector.py",
        "weight[0].unflatten(-1, (heads, -1)).transpose(0, 1)",
        "weight[0].unflatten(-1, (-1, heads)).permute(2, 0, 1)",
        "calibration_vector.py::test_a_joint_fit_is_least_squares_on_the_keys_of_all_heads",
    ),
    bug(
        "the share of keys is the paper's whatever is asked",
        "corrections/vector.py",
        "tokens * round(STEPS * share) // STEPS",
        "tokens // 2",
        "vector_cache.py::test_the_share_of_keys_is_an_option",
    ),
    bug(
        "a round does not know what the round before it evicted",
        "cache/selection.py",
        "left = replace(left, valid=kept, moments=signals.moments.add(signals.keys, signals.values, gone))",
        "left = replace(left, valid=kept)",
        "rounds.py::test_as_many_rounds_as_tokens_leave_are_one_token_at_a_time",
    ),
    bug(
        "blocks of a prompt are evicted from in rounds",
        "cache/prefill.py",
        "rule.config.prefill_block is None and rule.config.policy.moments.rounds > 1",
        "rule.config.policy.moments.rounds > 1",
        "rounds.py::test_blocks_are_not_read_in_rounds",
    ),
    bug(
        "attention without a causal mask is scaled although it should not be",
        "policies/compactor.py",
        "signals.layer.scale if self.scaled else 1.0",
        "signals.layer.scale",
        "policies_geometry.py::test_score_and_kept_set_equal_brute_force",
    ),
    bug(
        "values count after pooling although they should before",
        "policies/compactor.py",
        "(length, 1.0) if self.values_first else (1.0, length)",
        "(1.0, length)",
        "policies_geometry.py::test_score_and_kept_set_equal_brute_force",
    ),
    bug(
        "eigenvectors are divided by what fp32 makes of the Gram matrix",
        "reference/geometry.py",
        "torch.linalg.eigh(wide.transpose(-1, -2) @ wide)",
        "torch.linalg.eigh((wide.transpose(-1, -2) @ wide).float())",
        "reference_geometry.py::test_eigenvectors_of_the_gram_matrix_give_what_an_svd_of_the_keys_gives",
    ),
    bug(
        "lagkv compares a partition with the one before it",
        "policies/lagkv.py",
        "parts.amin(3, keepdim=True).roll(-1, 2), parts.amax(3, keepdim=True).roll(-1, 2)",
        "parts.amin(3, keepdim=True).roll(1, 2), parts.amax(3, keepdim=True).roll(1, 2)",
        EQUATION,
    ),
    bug(
        "lagkv lets the partition that nothing follows compete",
        "policies/lagkv.py",
        "// lag - 1",
        "// lag",
        f"{STATISTICS}::test_what_nothing_follows_stays",
    ),
    bug(
        "r-kv forgives the first repetition instead of the latest",
        "policies/rkv.py",
        "torch.where(like, places[:, :, None], -1).amax(-1, keepdim=True)",
        "torch.where(like, places[:, :, None], 1 << 30).amin(-1, keepdim=True)",
        f"{STATISTICS}::test_of_tokens_that_repeat_each_other_the_latest_stays",
    ),
    bug(
        "r-kv takes the least attended neighbour",
        "policies/rkv.py",
        "attention = max_pool1d(ordered,",
        "attention = -max_pool1d(-ordered,",
        EQUATION,
    ),
    bug(
        "expected attention forgets half of the rotation of the covariance",
        "policies/expectedattention.py",
        "covariance = rotary.ahead(half.transpose(-1, -2), newest, steps)",
        "covariance = half",
        EQUATION,
    ),
    bug(
        "expected attention rescores rows that asked nothing",
        "policies/expectedattention.py",
        "torch.where(count > 0, known, 0)",
        "signals.valid",
        f"{STATISTICS}::test_a_block_without_queries_of_its_own_changes_nothing",
    ),
    bug(
        "triattention looks from the present only",
        "policies/triattention.py",
        "steps = 2 ** torch.arange(self.horizon.bit_length()",
        "steps = 0 * torch.arange(self.horizon.bit_length()",
        EQUATION,
    ),
    bug(
        "triattention takes the mean of the group",
        "policies/triattention.py",
        ".amax(2)",
        ".mean(2)",
        EQUATION,
    ),
    bug(
        "the excess of queries is their whole length",
        "lab/fit_queries.py",
        " - self.rotary.lengths(turned)",
        "",
        "calibration_queries.py::test_fit_is_the_mean_of_the_queries_before_the_rotary_embedding",
    ),
    bug(
        "means of queries are taken after the rotary embedding",
        "lab/fit_queries.py",
        "rotary.unrotate(queries, positions).double()",
        "queries.double()",
        "calibration_queries.py::test_fit_is_the_mean_of_the_queries_before_the_rotary_embedding",
    ),
    bug(
        "anchors and protected tokens are refitted",
        "cache/refit.py",
        "free = kept & ~best & ~protected(candidates, state.seen, rule)",
        "free = kept",
        "ridge.py::test_values_are_those_of_ridge_regression",
    ),
    bug(
        "refitted values do not reach the slots",
        "cache/refit.py",
        "if exact.starts is None:  # where",
        "if False:  # where",
        "ridge.py::test_tokens_of_earlier_blocks_are_refitted_again",
    ),
    bug(
        "the refit regresses on what all tokens give",
        "corrections/ridge.py",
        "torch.where(free[:, :, None], rest, 0)",
        "torch.where(free[:, :, None], full, 0)",
        "ridge.py::test_values_are_those_of_ridge_regression",
    ),
    bug(
        "samples of a second reading depend on padding",
        "cache/wrappers.py",
        "torch.arange(num, device=q.device) * fed // num",
        "torch.arange(num, device=q.device) * (0 * fed + valid.shape[1]) // num",
        "reread.py::test_a_row_does_not_depend_on_its_padding",
    ),
    bug(
        "a second reading forgets its earlier chunks",
        "cache/wrappers.py",
        "self.reread.received.maximum(torch.where(self.held[3][:, None], most, 0))",
        "torch.where(self.held[3][:, None], most, 0)",
        "reread.py::test_a_row_does_not_depend_on_its_padding",
        "deferred.py::test_kvzip_keeps_what_a_second_reading_attends_to_most",
    ),
    # transformers.
    bug(
        "a second reading stands behind the real tokens, wherever the first one stood",
        "integrations/transformers/deferred.py",
        "follows = None if first.positions is None else next_position(first.positions, mask)",
        "follows = mask.sum(-1, keepdim=True)",
        "reread.py::test_a_row_does_not_depend_on_its_padding",
    ),
    bug(
        "the mask of a later block lacks the past",
        "integrations/transformers/prompt.py",
        "mask[:, : mask.shape[1] - total + end]",
        "mask[:, :end]",
        f"{CACHE}::test_windows_in_later_blocks_do_not_see_the_padding_of_the_first_turn",
    ),
    bug(
        "every block starts at position 0",
        "integrations/transformers/prompt.py",
        "positions[..., start:end]",
        "positions[..., : end - start]",
        "exact.py::test_budget_beyond_the_prompt_changes_nothing",
    ),
    bug(
        "an image beside a past is read causally",
        "integrations/transformers/blocks.py",
        'mask.get("full_attention") if isinstance(mask, dict) else mask',
        "None",
        "multimodal.py::test_tokens_of_an_image_see_each_other_beside_a_past",
    ),
    bug(
        "blocks cut images",
        "integrations/transformers/blocks.py",
        "farthest.cummax(0).values <= place",
        "farthest >= 0",
        "multimodal.py::test_blocks_cut_no_image",
    ),
    bug(
        "DeepStack's rows start anew in every block",
        "integrations/transformers/prompt.py",
        "rows = order[:, start:end][visual[:, start:end]]",
        "rows = torch.arange(int(visual[:, start:end].sum()))",
        "multimodal.py::test_a_prompt_with_an_image_or_a_sound_is_read_as_by_the_stock_model",
    ),
    bug(
        "generate continues the positions of another prompt",
        "integrations/transformers/generate.py",
        "self.base_model.rope_deltas = cache.rope_deltas",
        "pass",
        "multimodal.py::test_a_generated_turn_after_another_prompt",
    ),
    bug(
        "text after an image is placed as after text",
        "integrations/transformers/cache.py",
        "return positions if self.rope_deltas is None else positions + self.rope_deltas",
        "return positions",
        "multimodal.py::test_caches_know_their_own_positions",
    ),
    bug(
        "an additive mask makes every token real",
        "integrations/transformers/attention.py",
        "own > torch.finfo(own.dtype).min / 2",
        "own < torch.inf",
        "architectures.py::test_padding_follows_the_2d_mask",
    ),
    bug(
        "unpatch leaves a hook",
        "integrations/transformers/attach.py",
        "if hook in hooks]",
        "if hook in hooks[:1]]",
        "exact.py::test_unpatch_restores_every_attribute",
    ),
    # What a CPU runs.
    bug(
        "a slot that is not in use is attended to",
        "cpu/operations.py",
        'torch.arange(slots, device="cpu") < lengths.repeat_interleave',
        'torch.arange(slots, device="cpu") <= lengths.repeat_interleave',
        "cpu.py::test_a_step",
    ),
    bug(
        "tokens of a page that line up behind centroids are followed one place off",
        "lab/view/trace.py",
        "behind = parts.num + torch.arange(",
        "behind = parts.num + 1 + torch.arange(",
        "view.py::test_centroids_are_those_of_the_cache",
    ),
    bug(
        "a step's codes of keys and values are swapped",
        "reference/state.py",
        "(key_codes, codes), both = self.encode",
        "(codes, key_codes), both = self.encode",
        "slots.py::test_moving_never_rounds",
    ),
    bug(
        "heads of one length do not see their last token",
        "cpu/operations.py",
        "edge(slots)[slots - length : 2 * slots - length]",
        "edge(slots)[slots - length + 1 : 2 * slots - length + 1]",
        "cpu.py::test_a_step",
    ),
    bug(
        "a window forgets how many heads share a key",
        "cpu/operations.py",
        "share = query_valid.float() / (groups * ",
        "share = query_valid.float() / (1 * ",
        "cpu.py::test_what_a_window_of_queries_gives",
    ),
    bug(
        "a centroid counts half of its tokens",
        "cpu/operations.py",
        "logit += deviation",
        "logit += deviation - 0.6931472",
        "cpu.py::test_a_step",
    ),
    bug(
        "what was evicted gets the weight of what was kept",
        "cpu/operations.py",
        "merge_partials(out, lse, value, evicted)",
        "merge_partials(out, evicted, value, lse)",
        "cpu.py::test_a_step",
    ),
    bug(
        "a step forgets the sinks",
        "cpu/operations.py",
        "out, total = with_sink(out, total, state.sink_logits.view",
        "_ = with_sink(out, total, state.sink_logits.view",
        "cpu.py::test_a_step",
    ),
    bug(
        "slots receive what belongs to the sink",
        "cpu/operations.py",
        "out, total = with_sink(out, total, state.sink_logits.view",
        "out, _ = with_sink(out, total, state.sink_logits.view",
        "cpu.py::test_a_step",
    ),
    bug(
        "a block forgets the sinks",
        "cpu/operations.py",
        "out, lse = with_sink(",
        "_ = with_sink(",
        "cpu.py::test_a_block",
    ),
    bug(
        "a block sees its own future",
        "cpu/operations.py",
        "showing(valid)[:, None, None], causal=True",
        "showing(valid)[:, None, None]",
        "cpu.py::test_a_block",
    ),
    bug(
        "of no token, what is attended to is no number",
        "cpu/operations.py",
        "empty = k is None and not bool(slots.lengths.all())",
        "empty = False",
        "cpu.py::test_a_step_without_a_token",
    ),
    bug(
        "holes are filled with what leaves",
        "cpu/operations.py",
        "descending=True",
        "descending=False",
        "cpu.py::test_an_eviction",
    ),
    bug(
        "empty slots are remembered as evicted",
        "cpu/operations.py",
        "hiding(used.gather(-1, leaving))",
        "None",
        "cpu.py::test_an_eviction",
    ),
    # Kernels on slots of 8 and 4 bits.
    bug(
        "the scale of a value is left out of its weight",
        "kernels/_attention.py",
        "            weights *= _factors(state.value_scales_ptr, slot, inside)[None, :]\n",
        "            pass\n",
        "kernels_codes.py::test_decode_variants",
    ),
    bug(
        "codes round half up",
        "kernels/_codes.py",
        "normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960",
        "normal = ((size + 0x80000) >> 20) - 960",
        "kernels_codes.py::test_codes_are_those_of_the_reference",
    ),
    bug(
        "the scales of keys stay behind in an eviction",
        "kernels/evict.py",
        "            _move_scales(key_scales_ptr, hole, victims, source, D, BLOCK_D)\n",
        "",
        "kernels_codes.py::test_evict",
    ),
    bug(
        "a token of a block is stored with the scale of a slot",
        "kernels/compact.py",
        "scale = tl.where(old, tl.load(spot, mask=old, other=0), scales)",
        "scale = tl.load(spot, mask=old, other=0)",
        "kernels_codes.py::test_compact",
    ),
    bug(
        "the sum of rotated values is not turned back",
        "kernels/decode_attention.py",
        "            acc = _turned(acc, D)\n",
        "            acc = acc\n",
        "kernels_codes.py::test_decode_variants",
    ),
    bug(
        "rotated values move while other programs read them",
        "kernels/evict.py",
        "    if not _packed(value_scales_ptr):\n",
        "    if _packed(value_scales_ptr):\n"
        "        _move_rows(values_ptr, drop, hole, victims, source, mine, D // 2, R, TILE)\n"
        "    else:\n",
        f"{RACES}[evict-int4-6]",
    ),
    # Slots of codes on a CPU.
    bug(
        "the compiled maximum of logits leaves out a vector",
        "cpu/codes.cpp",
        "        for (int64_t i = WIDE; i < width; i += WIDE) {\n            Floats some = floats(row + i);\n",
        "        for (int64_t i = 2 * WIDE; i < width; i += WIDE) {\n            Floats some = floats(row + i);\n",
        f"{COMPILED}attention_finds_the_largest_logit",
    ),
    bug(
        "slots beyond the length of a head are attended to",
        "cpu/codes.cpp",
        "            for (int64_t i = length; i < width; ++i) mine[i] = -__builtin_inff();\n",
        "            for (int64_t i = length; i < width; ++i) mine[i] = 0;\n",
        f"{COMPILED}attention_is_that_of_decoded_slots",
    ),
    bug(
        "the compiled sum of rotated values is not turned back",
        "cpu/codes.cpp",
        "        if (Values::TURNED) SINGLE.turn(&mine[0], dim, all.root);\n",
        "",
        f"{COMPILED}attention_is_that_of_decoded_slots",
    ),
    bug(
        "keys of another format than values are encoded as those",
        "reference/state.py",
        'self.encode("keys", keys), self.encode("values", values)',
        'self.encode("values", keys), self.encode("values", values)',
        "slots.py::test_moving_never_rounds",
    ),
    bug(
        "queries are turned as values are",
        "cpu/codes.cpp",
        "if (Keys::TURNED) SINGLE",
        "if (Values::TURNED) SINGLE",
        f"{COMPILED}attention_is_that_of_decoded_slots",
    ),
    bug(
        "the budget's unit is missing from what a cache says",
        "integrations/transformers/cache.py",
        "for name in UNITS if",
        'for name in ("tokens", "keep", "bytes", "quality") if',
        "cache_operations.py::test_a_cache_says_what_it_is_in_any_unit",
    ),
    bug(
        "budgets in bytes keep the model's dtype",
        "config.py",
        "return replace(self, slots=INT4 if four else INT8)",
        "return self",
        "slots.py::test_budgets_in_bytes_are_spent_on_codes",
    ),
    bug(
        "slots that were asked for are those of auto",
        "config.py",
        "not self.chooses_slots or not budget.in_bytes",
        "not budget.in_bytes",
        "slots.py::test_budgets_in_bytes_are_spent_on_codes",
    ),
    bug(
        "criticalkv does not say what its base fixes of the budget",
        "policies/criticalkv.py",
        'second_reading, shares, calibration = map(_of_base, ("second_reading", "shares", "calibration"))',
        'second_reading, calibration = map(_of_base, ("second_reading", "calibration"))',
        "policies_attention.py::test_criticalkv_passes_on_what_its_base_asks_for",
    ),
    bug(
        "a model whose rotation cannot be undone gets the default policy all the same",
        "integrations/transformers/selfcheck.py",
        "return with_rotations(otherwise, model, found)",
        "return config",
        f"{HEADS}::test_models_whose_rotation_follows_the_length_get_another_default",
    ),
    bug(
        "heads that have no whole group get slots of 4 bits",
        "config.py",
        " and not any(size % INT4_GROUP for size in sizes)",
        "",
        "slots.py::test_budgets_in_bytes_are_spent_on_codes",
    ),
    bug(
        "times smaller is of the tokens kept, not of the prompt",
        "budget.py",
        "num_layers * cost.full * context / (self.compress or 1)",
        "num_layers * cost.full * self.reserved / (self.compress or 1)",
        "budget.py::test_times_smaller_is_of_a_bfloat16_cache_of_the_prompt",
    ),
    bug(
        "a stock cache of latents is taken for one of keys",
        "prefix.py",
        "or modules.sources(model) or latents:",
        "or modules.sources(model):",
        "prefix.py::test_refusals_change_nothing",
    ),
    bug(
        "stretches of a head count alike, whatever their largest logit",
        "cpu/codes.cpp",
        "shares[part] = __builtin_expf(tops[part * rows + row] - top);",
        "shares[part] = 1;",
        "cpu.py::test_stretches_of_a_head_add_up",
    ),
    bug(
        "weights of a stretch are not scaled to those of the head",
        "cpu/codes.cpp",
        "all.weights && i < parts[part].last; ++i) weights[i] *= share;",
        "false; ++i) weights[i] *= share;",
        "cpu.py::test_stretches_of_a_head_add_up",
    ),
    bug(
        "a stretch that no query sees is not a number",
        "cpu/codes.cpp",
        "if (top == -__builtin_inff()) {",
        "if (false) {",
        "cpu.py::test_stretches_of_a_head_add_up",
    ),
    bug(
        "a zero point counts as it is, not in steps",
        "cpu/codes.cpp",
        "zeros[group] = -steps[group] * int8_t",
        "zeros[group] = -int8_t",
        "slots.py::test_every_code_is_read_alike",
    ),
    bug(
        "compiled codes of e4m3 round half up",
        "cpu/codes.cpp",
        "(size + 0x7FFFF + (size >> 20 & 1)) >> 20",
        "(size + 0x80000) >> 20",
        "slots.py::test_compiled_codes_round_half_to_even",
    ),
    bug(
        "heads that own stretches are all read from the first slot",
        "cpu/codes.cpp",
        "first_slot((all.starts ? all.starts[place + batch] : 0) + part.first)",
        "first_slot(part.first)",
        "slots.py::test_slots_are_decoded_where_nothing_compiles",
    ),
    bug(
        "a compiled token goes to the slot before its own",
        "cpu/codes.py",
        "            pointers.append(part.data_ptr() + first * slot)\n",
        "            pointers.append(part.data_ptr() + max(first - 1, 0) * slot)\n",
        "slots.py::test_slots_are_decoded_where_nothing_compiles",
    ),
    bug(
        "compiled joins take the first of the halves in every round",
        "cpu/joins.cpp",
        "used > all.num; half = 1 - half)",
        "used > all.num; half = 0)",
        "cpu.py::test_compiled_joins_are_those_of_the_reference",
    ),
    bug(
        "a compiled join counts the spread of the mover only",
        "cpu/joins.cpp",
        "            if (grown[part]) moved[part] += count[part] * distance(part, part);\n",
        "",
        "cpu.py::test_compiled_joins_are_those_of_the_reference",
    ),
    bug(
        "all tokens of a prompt join at once",
        "cpu/joins.cpp",
        "std::min(from + all->block, all->fresh)",
        "all->fresh",
        "cpu.py::test_a_prompt_joins_block_by_block",
    ),
    bug(
        "the last partners of a round are never asked",
        "cpu/joins.cpp",
        "number = (used - first + 1) / 2, columns",
        "number = (used - first) / 2, columns",
        "cpu.py::test_compiled_joins_are_those_of_the_reference",
    ),
    bug(
        "compiled rounds are fine for many centroids, too",
        "cpu/joins.cpp",
        "used <= all.roomy * all.num ? all.medium : all.coarse",
        "all.medium",
        "cpu.py::test_rounds_are_as_coarse_as_in_the_reference",
    ),
    bug(
        "compiled means in bf16 are all rounded down",
        "cpu/joins.cpp",
        "        return (uint32_t(bits_of(number)) + threshold) >> 16;\n",
        "        return uint32_t(bits_of(number)) >> 16;\n",
        "cpu.py::test_compiled_joins_carry_what_is_rounded_away",
    ),
    bug(
        "compiled joins read tokens that stay",
        "cpu/joins.cpp",
        "            if (all.inside[token])\n",
        "",
        "cpu.py::test_masked_tokens_are_not_read",
    ),
    bug(
        "compiled peaks leave sinks out of what weights are shares of",
        "cpu/peaks.cpp",
        "__builtin_logf(total_of(sum) + __builtin_expf(sink - top))",
        "__builtin_logf(total_of(sum))",
        "cpu.py::test_compiled_peaks_are_those_of_the_reference",
    ),
    bug(
        "the last queries of a thread are not asked",
        "cpu/peaks.cpp",
        "for (int64_t one = 0; one < number; ++one) {\n            const float* own",
        "for (int64_t one = 0; one < number - (number < TILE); ++one) {\n            const float* own",
        "cpu.py::test_compiled_peaks_are_those_of_the_reference",
    ),
    bug(
        "who is not asked has a say in the largest attention",
        "kernels/peak_attention.py",
        "    sees = asks & (total > 0)\n",
        "    sees = total > 0\n",
        "kernels_scores.py::test_who_is_not_asked_has_no_say",
    ),
    bug(
        "the largest attention is that of one head of the group",
        "kernels/peak_attention.py",
        "        head = kv * G + group\n",
        "        head = kv * G\n",
        "kernels_scores.py::test_peaks_groups",
    ),
    # Kernels, whose programs run in any order.
    bug(
        "a partial is stored after its ticket",
        "kernels/decode_attention.py",
        """        _store_partial(parts, number, top, total, acc, ALL, GROUP)
        _barrier(HIP)  # orders every thread's stores before the ticket; Triton <= 3.8 would not
        if tl.atomic_add(tickets_ptr, 1, sem="acq_rel", scope="gpu") == splits + (PARTS - SPLITS) - 1:
""",
        """        _barrier(HIP)
        taken = tl.atomic_add(tickets_ptr, 1, sem="acq_rel", scope="gpu")
        _store_partial(parts, number, top, total, acc, ALL, GROUP)
        _barrier(HIP)
        if taken == splits + (PARTS - SPLITS) - 1:
""",
        f"{RACES}[decode-6]",
    ),
    bug(
        "a ticket is taken before all threads have stored",
        "kernels/decode_attention.py",
        "number, top, total, acc, ALL, GROUP)\n        ",
        "number, top, total, acc, ALL, GROUP)\n        if SPLITS == 0:\n            ",
        f"{RACES}[decode-6]",
    ),
    bug(
        "a ticket orders nothing",
        "kernels/decode_attention.py",
        'sem="acq_rel"',
        'sem="relaxed"',
        f"{RACES}[decode-6]",
    ),
    bug(
        "tickets are not reset",
        "kernels/decode_attention.py",
        "            tl.store(tickets_ptr, 0)\n",
        "",
        f"{RACES}[decode-6]",
    ),
    bug(
        "who is last merges its own partial only",
        "kernels/decode_attention.py",
        "(numbers < splits)[None, :]",
        "(numbers == split)[None, :]",
        f"{RACES}[decode-6]",
    ),
    bug(
        "the last in number merges instead of the last to arrive",
        "kernels/decode_attention.py",
        'if tl.atomic_add(tickets_ptr, 1, sem="acq_rel", scope="gpu") == splits + (PARTS - SPLITS) - 1:',
        'tl.atomic_add(tickets_ptr, 1, sem="acq_rel", scope="gpu")\n        if split == PARTS - 1:',
        f"{RACES}[decode-6]",
    ),
    bug(
        "two programs store their partials in the same place",
        "kernels/decode_attention.py",
        "_store_partial(parts, number, top, total, acc,",
        "_store_partial(parts, number // 2 * 2, top, total, acc,",
        f"{RACES}[decode-6]",
    ),
    bug(
        "the first to arrive merges what only keys gave",
        "kernels/vector_decode.py",
        'scope="gpu") == PARTS - 1:',
        'scope="gpu") == 0:',
        f"{RACES}[vector-6]",
    ),
    bug(
        "merged keys are read before all threads have stored them",
        "kernels/vector_decode.py",
        "approx_factor[:, None], mask=mask)\n        ",
        "approx_factor[:, None], mask=mask)\n        if PARTS == 0:\n            ",
        f"{RACES}[vector-6]",
    ),
    bug(
        "keys move while other parts read them",
        "kernels/evict.py",
        "    _move_rows(values_ptr, drop, hole, victims, source, mine, D, R, TILE)\n",
        """    _move_rows(values_ptr, drop, hole, victims, source, mine, D, R, TILE)
    _move_rows(keys_ptr, drop, hole, victims, source, cols, D, R, TILE)
""",
        f"{RACES}[evict-6]",
    ),
    bug(
        "every part adds to the spread",
        "kernels/evict.py",
        "if part == 0:  # no other part reads it",
        "if part >= 0:",
        f"{RACES}[evict-candidates-6]",
    ),
    bug(
        "tickets of an eviction are not reset",
        "kernels/evict.py",
        "        tl.store(tickets_ptr + pair, 0)\n",
        "",
        f"{RACES}[evict-6]",
    ),
    bug(
        "every slice stores the same key mean and count",
        "kernels/compact.py",
        "    if tl.program_id(1) == 0:\n        tl.store(key_mean_ptr",
        "    if tl.program_id(1) >= 0:\n        tl.store(key_mean_ptr",
        f"{RACES}[compact-6]",
    ),
    # Kernels in pages.
    bug(
        "attention is added up in another row's page",
        "kernels/decode_attention.py",
        "state = StatePointers(*[p if p is None else",
        "state = StatePointers(*[p if p is None or p is state.attention_ptr else",
        f"{IN_PAGES}_do_what_the_reference_does_to_rows",
    ),
    bug(
        "pages are twice as close",
        "kernels/_attention.py",
        "row * page * (128 //",
        "row * page * (64 //",
        "rows.py::test_pages_may_be_far_apart",
    ),
    bug(
        "a state without pages has as many heads as there are rows",
        "kernels/_attention.py",
        "return row, row * HEADS + pair % HEADS",
        "return row, row + pair % HEADS",
        "rows.py::test_pages_may_be_far_apart",
    ),
    bug(
        "nobody's row attends",
        "kernels/decode_attention.py",
        "        if row == 0:\n",
        "        if row < 0:\n",
        f"{IN_PAGES}_do_what_the_reference_does_to_rows",
    ),
    bug(
        "rows of a batch share the scratch of one",
        "kernels/_attention.py",
        "return base + (pair - own) // HEADS * slots",
        "return base",
        f"{RACES}[decode-rows-6]",
    ),
    bug(
        "tickets lie where other batches have numbers",
        "kernels/_launch.py",
        '{"tickets": self.tickets[: prod(shapes["tickets"])]}',
        '{"tickets": self.numbers[: prod(shapes["tickets"])].view(torch.int32)}',
        f"{PAGED}::test_what_one_batch_leaves_in_scratch_is_nothing_to_another",
    ),
    bug(
        "every size of a batch has scratch of its own",
        "cache/workspace.py",
        "ops.workspace(num_heads, state, spec, self._room_of(shape, num_heads, state, spec))",
        "ops.workspace(num_heads, state, spec)",
        f"{PAGED}::test_batches_of_all_sizes_share_scratch_whose_bytes_are_known",
    ),
    bug(
        "kernels run on the current GPU",
        "ops/operator.py",
        "                with torch.cuda.device(device):\n",
        "                with torch.cuda.device(torch.device('cuda', 0)):\n",
        "launches.py::test_kernels_are_launched_where_their_tensors_are",
    ),
    bug(
        "a cleared page waits for numbers of the host",
        "reference/state.py",
        "                self.starts[:, head + 1].fill_(end)\n",
        "                self.starts[:, head + 1] = torch.tensor(end, device=self.starts.device)\n",
        "no_sync.py::test_nor_do_pages",
    ),
    bug(
        "prompts that are read together count on the slots of the one that has read least",
        "cache/paged.py",
        "slots.filled, slots.limit = (max(numbers) for numbers in zip(*known))",
        "slots.filled, slots.limit = (min(numbers) for numbers in zip(*known))",
        "paged.py::test_prompts_that_are_read_together_do_not_depend_on_each_other",
    ),
    bug(
        "what padding holds reaches the sequences of a round",
        "cache/paged.py",
        "        if blocks.padded:\n",
        "        if False:\n",
        "paged.py::test_prompts_that_are_read_together_do_not_depend_on_each_other",
    ),
    bug(
        "the last prompt of a round is written where the one before it lies",
        "integrations/vllm/batch.py",
        "range(place * longest, place * longest + length)",
        "range(max(place - 1, 0) * longest, max(place - 1, 0) * longest + length)",
        "serving_batch.py::test_batches_of_traffic",
    ),
    bug(
        "sequences that are not due are copied with those that are",
        "cache/paged.py",
        "in due.split(AT_ONCE) if len(due) else ()",
        "in torch.where(torch.isin(rows, due), rows, 0).split(AT_ONCE) if len(due) else ()",
        f"{PAGED}::test_an_eviction_touches_as_many_bytes_whatever_the_batch",
    ),
    bug(
        "what a policy remembers stays behind in pages",
        "cache/compaction.py",
        "    slots.memory.index_copy_(0, state.rows, memory)\n",
        "",
        "rows.py::test_evictions_happen_in_pages",
    ),
    bug(
        "a request is asked for its page at every block",
        "integrations/vllm/batch.py",
        "[i for i in reading if self.copies or seen[i] == counts[i]]",
        "list(reading)",
        f"{SERVING}::test_the_host_waits_once_for_each_prompt_and_never_while_decoding",
    ),
    bug(
        "a request keeps the page of whoever had its place before",
        "integrations/vllm/batch.py",
        "[i for i in reading if self.copies or seen[i] == counts[i]]",
        "[i for i in reading if names[i] not in self.pages]",
        f"{SERVING}::test_batches_of_traffic",
    ),
    bug(
        "a page that a request begins from is given to another in the same step",
        "integrations/vllm/prefixes.py",
        "            self.pool.touch(pages)\n            self.found[name] = pages\n",
        "            self.found[name] = pages\n",
        f"{PREFIXES}::test_a_page_that_is_read_from_is_not_given_away_in_that_step",
    ),
    bug(
        "a request that ends takes what its prompt left with it",
        "integrations/vllm/prefixes.py",
        "            self.pool.touch(pages)\n            self._reached[key] = pages\n",
        "            self._reached[key] = pages\n",
        f"{PREFIXES}::test_pages_hold_what_their_keys_say",
    ),
    bug(
        "a page that was given away is still found",
        "integrations/vllm/prefixes.py",
        "if page.block_id not in numbers}",
        "}",
        f"{PREFIXES}::test_pages_hold_what_their_keys_say",
    ),
    bug(
        "the prefix kept first goes first, used or not",
        "integrations/vllm/prefixes.py",
        "self.kept[key] = numbers = self.kept.pop(key)",
        "numbers = self.kept[key]",
        f"{PREFIXES}::test_the_least_recently_used_goes_first",
    ),
    bug(
        "a copied page is read as if it were empty",
        "cache/paged.py",
        "room, layout = self.reached[seen], self.rule.layout",
        "room, layout = self.reached[0], self.rule.layout",
        f"{PAGED}::test_a_copied_page_goes_on_as_the_first",
    ),
    bug(
        "a request that goes on from a copy gets the page of whoever had its place before",
        "integrations/vllm/batch.py",
        "self.copies or seen[i] == counts[i]",
        "seen[i] == counts[i]",
        f"{SERVING}::test_a_sequence_may_go_on_from_a_copy",
    ),
    bug(
        "numbers for the device are not pinned",
        "integrations/vllm/batch.py",
        "made.pin_memory().to(device, non_blocking=True)",
        "made.to(device, non_blocking=True)",
        f"{SERVING}::test_the_host_waits_once_for_each_prompt_and_never_while_decoding",
    ),
    bug(
        "the host waits until the device has the numbers",
        "integrations/vllm/batch.py",
        "made.pin_memory().to(device, non_blocking=True)",
        "made.pin_memory().to(device)",
        f"{SERVING}::test_the_host_waits_once_for_each_prompt_and_never_while_decoding",
    ),
    bug(
        "no short blocks are read before there is traffic",
        "cache/warmup.py",
        "{*range(1, FEW + 1), self.largest}",
        "{self.largest}",
        f"{WARMUP}[centroids]",
    ),
    bug(
        "no lengths between powers of two are read before there is traffic",
        "cache/warmup.py",
        "for power in powers for more in FURTHER}",
        "for power in powers for more in (0,)}",
        f"{WARMUP}[all queries watched]",
    ),
    bug(
        "slots are never full before there is traffic",
        "cache/warmup.py",
        "for blocks in (0, 1, filling, filling + 1)}",
        "for blocks in (0, 1)}",
        f"{WARMUP}[centroids]",
    ),
    bug(
        "only the largest batch decodes before there is traffic",
        "cache/warmup.py",
        "for batch in range(1, traffic.sequences + 1):",
        "for batch in [traffic.sequences]:",
        f"{WARMUP}[centroids]",
    ),
    bug(
        "on AMD threads count keys that others have not written yet",
        "kernels/select.py",
        "        _barrier(HIP)  # keys are counted by other threads than wrote them\n",
        "        tl.debug_barrier()\n",
        "aot.py::test_keys_of_long_heads_are_written_before_other_threads_count_them",
    ),
    bug(
        "sketches are made anew at every eviction",
        "ops/scores.py",
        "@functools.lru_cache(maxsize=64)",
        "@functools.lru_cache(maxsize=0)",
        f"{GEOMETRY}::test_a_sketch_is_sent_to_a_device_once",
    ),
    bug(
        "a sketch that was changed stays so",
        "ops/scores.py",
        "keys.device).clone()",
        "keys.device)",
        f"{GEOMETRY}::test_a_sketch_is_sent_to_a_device_once",
    ),
    bug(
        "nobody's row evicts, in several programs at once",
        "kernels/evict.py",
        """        if row == 0:
            return
    keys_ptr""",
        """        if row < 0:
            return
    keys_ptr""",
        f"{RACES}[evict-rows-6]",
    ),
    bug(
        "what is evicted is counted in another row's page",
        "kernels/evict.py",
        "    count_ptr = _page(count_ptr, row, page)\n",
        "",
        f"{IN_PAGES}_do_what_the_reference_does_to_rows",
    ),
    # Operators, and what is remembered of what was evicted.
    bug(
        "an operator reads all slots instead of those that may be filled",
        "ops/operator.py",
        'found["exact"]}, filled=filled, ',
        'found["exact"]}, filled=limit, ',
        "ops.py::test_flat_states_come_back_whole",
    ),
    bug(
        "an operator forgets what tokens are protected",
        "ops/operator.py",
        "{spec.sinks} {spec.recent}",
        "0 0",
        "ops.py::test_flat_states_come_back_whole",
    ),
    bug(
        "two keys take the room of two pairs",
        "corrections/vector.py",
        "tokens - extra // 2",
        "tokens - extra",
        "corrections.py::test_two_keys_take_the_room_of_a_pair",
    ),
    bug(
        "a state with centroids is read as moments",
        "corrections/__init__.py",
        "if state.parts is not None:",
        "if False:",
        "corrections.py::test_reading_prefers_centroids",
    ),
    bug(
        "centroids cost nothing",
        "corrections/centroids.py",
        "sketch=shape.heads * shape.pair / self.share, part=part, least=LEAST * part",
        "part=part",
        "corrections.py::test_the_cost_is_what_the_state_holds",
    ),
    bug(
        "slots of fewer bits have fewer centroids for the same tokens",
        "corrections/base.py",
        "self.itemsize if self.format.plain else 2",
        "self.itemsize if self.format.plain else 1",
        "slots.py::test_centroids_follow_tokens_not_codes",
    ),
    bug(
        "the reference falls back on the CPU's functions",
        "backend.py",
        'MODULES = {"reference": ".reference"',
        'MODULES = {"reference": ".cpu"',
        "backend.py::test_the_reference_calls_no_other_backend",
    ),
    bug(
        "joined centroids forget how far apart they were",
        "reference/centroids.py",
        "added_at(self.spread + self.count * moved.square().mean(-1), target)",
        "added_at(self.spread, target)",
        f"{CENTROIDS}::test_merging_conserves_count_means_and_squares",
    ),
    # Sequences in pages.
    bug(
        "the host lets a sequence in a page evict a step late",
        "cache/paged.py",
        "(seen[i] - self.prompted[names[i]]) % self.period == 0",
        "(seen[i] - self.prompted[names[i]]) % self.period == 1",
        "paged.py::test_the_host_knows_when_sequences_are_due",
    ),
    # What commands say.
    bug(
        "the demo takes a part of a word for the answer",
        "lab/demo.py",
        'f" {plain(self.answer)} " in f" {plain(said)} "',
        "plain(self.answer) in plain(said)",
        "cli.py::test_an_answer_of_the_demo_is_whole_words",
    ),
    bug(
        "the demo compares each cache with itself",
        "lab/demo.py",
        "full = logits if full is None else full",
        "full = logits",
        "cli.py::test_the_demo_measures_each_cache",
    ),
    bug(
        "the full cache of a reading takes values for keys",
        "lab/reading.py",
        "*held.tokens[1:3], index",
        "*held.tokens[2:0:-1], index",
        "reading.py::test_full_is_the_stock_cache",
    ),
    bug(
        "the page has a token leave one forward late",
        "lab/view/trace.py",
        "one.gone[mask] = len(events)",
        "one.gone[mask] = len(events) + 1",
        "view.py::test_the_page_says_what_the_cache_holds",
    ),
    bug(
        "the page follows a token into the centroid beside its own",
        "lab/view/trace.py",
        "scatter_(-1, order, place + 1)",
        "scatter_(-1, order, place.roll(1, -1) + 1)",
        "view.py::test_centroids_are_those_of_the_cache",
    ),
    bug(
        "an error of the page is that of the layer beside",
        "lab/view/trace.py",
        "full.attention[index][before:seen])",
        "full.attention[index ^ 1][before:seen])",
        "view.py::test_errors_are_those_of_fidelity",
    ),
    bug(
        "a page has first and second bytes of numbers by turns",
        "lab/view/page.py",
        ".reshape(-1, 2).T",
        ".reshape(-1, 2)",
        "view.py::test_a_page_of_a_long_text_is_small_and_holds_the_trace",
    ),
    bug(
        "a text can end the script of the page",
        "lab/view/page.py",
        '.replace("<", "\\\\u003c")',
        "",
        "view.py::test_a_text_cannot_leave_its_place",
    ),
    bug(
        "bench measures a cache that evicts once in all samples",
        "lab/bench/measure.py",
        '"evict_every": settings.period',
        '"evict_every": settings.period * 8',
        "bench.py::test_what_is_measured",
    ),
    bug(
        "bench counts what was freed before the clock ran",
        "lab/bench/clock.py",
        '        return max(resident_set("VmHWM") - self.start, 0)',
        '        return resident_set("VmHWM")',
        "bench.py::test_peaks_see_what_was_freed_and_start_at_zero",
    ),
    bug(
        "the cost of a merge forgets how many tokens it joins",
        "reference/centroids.py",
        "return distance.div_(share[..., movers, None] + share[..., None, partners])",
        "return distance",
        "reference_centroids.py::test_a_round_joins_the_cheapest_pairs_of_the_two_halves",
    ),
    bug(
        "a centroid weighs as much as one token",
        "reference/centroids.py",
        "count.log() + logit",
        "logit",
        f"{CENTROIDS}::test_one_centroid_is_the_mean",
    ),
    bug(
        "tokens that stay join the centroids too",
        "reference/selection.py",
        "gone = valid & ~kept",
        "gone = valid",
        "kernels_remember.py::test_an_eviction",
    ),
    bug(
        "every block has the padding of the first",
        "integrations/transformers/blocks.py",
        "padding[:, end - num : end]",
        "padding[:, :num]",
        "bounds.py::test_bound_and_conservation",
    ),
    bug(
        "a layer evicts before others have attended to its keys",
        "cache/layer.py",
        "if clock.now.evicts and not self.kv_sharers:",
        "if clock.now.evicts:",
        "architectures.py::test_a_layer_evicts_after_its_last_reader",
    ),
    bug(
        "a block is evicted from before others have attended to it",
        "cache/layer.py",
        "if self.kv_sharers:\n            self.queries = q",
        "if self.kv_sharers > 9:\n            self.queries = q",
        "architectures.py::test_a_layer_evicts_after_its_last_reader",
    ),
    bug(
        "layers share the keys of the first of their kind",
        "integrations/transformers/modules.py",
        "own[kind] = layer",
        "own.setdefault(kind, layer)",
        "architectures.py::test_with_room_for_everything_nothing_changes",
    ),
    bug(
        "a clone shares what stays transformers'",
        "integrations/transformers/stock.py",
        "holder[place] = holder[place].detach().clone()",
        "holder[place] = holder[place].detach()",
        "architectures.py::test_caches_travel",
    ),
    bug(
        "states of linear attention stay where they are when rows move",
        "integrations/transformers/stock.py",
        "old, new = holder[place], change(holder[place])",
        "old, new = holder[place], change(holder[place]) if place in PAIRS else holder[place]",
        "architectures.py::test_caches_travel",
    ),
    bug(
        "tokens that attention was not called for are forgotten",
        "integrations/transformers/layer.py",
        "self.awaited = True",
        "self.awaited = False",
        "architectures.py::test_one_call_of_attention_for_every_update",
    ),
    bug(
        "attention ignores arguments that it does not know",
        "integrations/transformers/attention.py",
        "and name not in POSITIONS]",
        "and name in POSITIONS]",
        "architectures.py::test_unknown_tensors_of_attention",
    ),
    bug(
        "the queries of a KV head see a window as if they followed each other",
        "integrations/transformers/attention.py",
        '**kwargs | {"is_causal": False})',
        "**kwargs)",
        "sliding_window.py::test_it_is_what_transformers_computes",
    ),
    bug(
        "a window copies its keys for every query",
        "integrations/transformers/attention.py",
        "if num > 1 or not same",
        "if num > 0 or not same",
        "sliding_window.py::test_a_step_copies_no_keys",
    ),
    bug(
        "a window shows all heads what the mask shows the first",
        "integrations/transformers/attention.py",
        "if num > 1 or not same or",
        "if num > 1 or",
        "sliding_window.py::test_it_is_what_transformers_computes",
    ),
    bug(
        "the last rounds of centroids are no finer than the first",
        "reference/centroids.py",
        "torch.where(used <= SETTLED, FINE, torch",
        "torch.where(used <= SETTLED, MEDIUM, torch",
        "reference_centroids.py::test_rounds_become_finer",
    ),
    bug(
        "a head with fewer centroids loses some where rounds become finer",
        "reference/centroids.py",
        "for used in (total, SETTLED, ROOMY * num))",
        "for used in (total, ROOMY * num))",
        "reference_centroids.py::test_rounds_become_finer",
    ),
    bug(
        "the kernel's first rounds are as fine as those on the way",
        "kernels/remember.py",
        "num * ROOM, MIDDLE, START)",
        "num * ROOM, MIDDLE, MIDDLE)",
        "kernels_remember.py::test_rounds_become_finer",
    ),
    bug(
        "the kernel's movers are always the same half",
        "kernels/remember.py",
        "used, half, flip = used - joins, 1 - half, 1 - flip",
        "used, half, flip = used - joins, half, 1 - flip",
        JOINING,
    ),
    bug(
        "the kernel forgets how far apart the tokens of a mover were",
        "kernels/remember.py",
        "spread += tl.load(spreads_ptr + gone, mask=comes, other=0.0) + size",
        "spread += size",
        JOINING,
    ),
    bug(
        "centroids round to the nearest number",
        "reference/centroids.py",
        "threshold = ((steps + turns) >> 16 & 0xFFFF).int()",
        "threshold = torch.full_like(steps + turns, 0x8000).int()",
        f"{CENTROIDS}::test_a_heavy_mean_in_bfloat16_follows_its_tokens",
    ),
    bug(
        "the kernel rounds all centroids alike",
        "kernels/remember.py",
        "size.to(tl.int32)[:, None] * PER_TOKEN",
        "size.to(tl.int32)[:, None] * 0",
        "kernels_remember.py::test_means_in_bfloat16",
    ),
    bug(
        "a prompt block multiplies with the leading bits of centroids",
        "kernels/_evicted.py",
        "_dot_terms(products, q, tl.trans(k), 3)\n            square",
        "_dot_terms(products, q, tl.trans(k), 1)\n            square",
        f"{PROMPTS}::test_centroids",
    ),
    bug(
        "the kernels forget how far apart the tokens of a centroid are",
        "kernels/_evicted.py",
        "logits = (logits + _log_cosh(deviation)) * LOG2E",
        "logits = logits * LOG2E",
        f"{PROMPTS}::test_centroids",
    ),
    bug(
        "a prompt block reads the same coordinates of keys again",
        "kernels/prefill_attention.py",
        "_tile(keys_ptr + begin, first",
        "_tile(keys_ptr, first",
        f"{PROMPTS}::test_odd_sizes",
    ),
    bug(
        "prompt blocks of all sequences read what the first page's have evicted",
        "kernels/prefill_attention.py",
        "_page(p, home, page) for p in evicted]",
        "_page(p, 0, page) for p in evicted]",
        "rows.py::test_rows_of_pages",
    ),
    bug(
        "the evicted mass of a prompt block is that of one token more",
        "kernels/prefill_attention.py",
        "tl.store(results.lse_evicted_ptr + place, _lse(top, total), mask=rows)",
        "tl.store(results.lse_evicted_ptr + place, _lse(top, total + 1), mask=rows)",
        f"{PROMPTS}::test_orders_and_softcap",
    ),
    bug(
        "flash-attn attends to a block from its first token on, whether it is padding or not",
        "kernels/_flash.py",
        "row * T + tl.where(whole, begin, T)",
        "row * T + tl.where(whole, 0, T)",
        "kernels_flash.py::test_padding",
    ),
    bug(
        "a block that flash-attn has attended to is attended to again",
        "kernels/prefill_attention.py",
        "last = tl.where(begin < end, 0, last)",
        "last = tl.where(begin < end, last, last)",
        "kernels_flash.py::test_nothing_is_retained_or_evicted",
    ),
    bug(
        "a flash-attn that ignores the sinks of a model is accepted",
        "integrations/transformers/attach.py",
        "elif families.is_flash(base) and not vouched:",
        "elif families.is_flash(base) and vouched:",
        "flash_base.py::test_sinks_need_an_implementation_that_the_model_vouches_for",
    ),
    bug(
        "what a policy observes knows nothing of the evicted mass",
        "cache/layer.py",
        "self.absorb(q, k, v, valid, mass=mass)",
        "self.absorb(q, k, v, valid)",
        "centroid_cache.py::test_the_evicted_mass_of_a_block_reaches_what_is_observed",
    ),
    bug(
        "fastkv asks queries of padding",
        "policies/fastkv.py",
        "asked = (~real).to(torch.uint8)",
        "asked = real.to(torch.uint8)",
        EQUATION,
    ),
    bug(
        "fastkv forgets what earlier blocks looked up",
        "policies/fastkv.py",
        "signals.memory.maximum(self._peak(signals))",
        "self._peak(signals)",
        EQUATION,
    ),
    bug(
        "fastkv takes expected attention as it is, not its logarithm",
        "policies/fastkv.py",
        "expected.clamp(min=TINY).log()",
        "expected.clamp(min=TINY)",
        EQUATION,
    ),
    bug(
        "fastkv compares keys as they are turned",
        "policies/fastkv.py",
        "rotary.unrotate(signals.keys.to(compute_dtype(signals.keys)), signals.positions)",
        "signals.keys.to(compute_dtype(signals.keys))",
        EQUATION,
    ),
    bug(
        "a second reading forgets how long values are",
        "policies/fastkv.py",
        "(signals.reread.received * length)",
        "(signals.reread.received + 0 * length)",
        f"{STATISTICS}::test_a_second_reading_says_what_was_looked_up",
    ),
    bug(
        "a curve leaves out what the second reading's own tokens weigh",
        "integrations/transformers/calibrate.py",
        "kept = upto(weights) + own_weight[..., None]",
        "kept = upto(weights) + 1e-6 * own_weight[..., None]",
        f"{HEADS}::test_a_curve_is_what_a_head_loses_by_keeping_only_its_best_tokens",
    ),
    bug(
        "the heads of a group are squared apart",
        "integrations/transformers/calibrate.py",
        "change.sum(0).square().sum(0)",
        "change.square().sum(0).sum(0)",
        f"{HEADS}::test_a_curve_is_what_a_head_loses_by_keeping_only_its_best_tokens",
    ),
    bug(
        "shares follow the curve instead of its hull",
        "integrations/transformers/calibrate.py",
        "while len(corners) > 1:",
        "while len(corners) > len(values):",
        f"{HEADS}::test_the_hull_of_a_curve_lies_below_it_and_is_convex",
    ),
    bug(
        "the last head gets what rounding leaves, the others less",
        "calibration/head_shares.py",
        "ends[-1] = total",
        "ends[-1] = total - 1",
        f"{HEADS}::test_all_tokens_are_dealt_and_none_twice",
    ),
    bug(
        "a head may hold more than there is",
        "calibration/head_shares.py",
        "most = float(context) if context > average else math.inf",
        "most = math.inf",
        f"{HEADS}::test_all_tokens_are_dealt_and_none_twice",
    ),
    bug(
        "shares between two budgets are those of the larger",
        "calibration/head_shares.py",
        "first + (second - first) * (place - below)",
        "first + (second - first) * 0",
        f"{HEADS}::test_shares_have_the_mean_one_and_are_linear_in_the_logarithm",
    ),
    bug(
        "a text shorter than the budget is evicted from",
        "calibration/head_shares.py",
        "if context <= average and layers is None:",
        "if False:",
        f"{HEADS}::test_a_text_that_fits_is_kept_by_all_heads",
    ),
    bug(
        "heads keep their first deal however long the text becomes",
        "cache/layer.py",
        "or context <= max(self.context, self.average):",
        "or self.context:",
        f"{HEADS}::test_heads_are_dealt_anew_as_a_text_grows",
    ),
    bug(
        "slots are dealt anew and what they hold stays behind",
        "reference/state.py",
        "        self.deal(capacities)\n\n    def trade",
        "        self.limit = max(capacities)\n\n    def trade",
        f"{HEADS}::test_heads_are_dealt_anew_as_a_text_grows",
    ),
    bug(
        "a static cache is dealt anew",
        "integrations/transformers/layer.py",
        "elif not self.cache.static:",
        "else:",
        f"{HEADS}::test_static_steps_keep_their_slots",
    ),
    bug(
        "shares of other weights are taken",
        "integrations/transformers/calibrate.py",
        "shares.weights != weights:",
        "not shares.weights:",
        f"{HEADS}::test_where_patch_finds_them",
    ),
]


def run_pytest(root: Path, tests: Sequence[str], log: Path) -> None:
    """In a process of its own, which has imported everything but the package and its tests: run tests under `root`."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("fastkv", "tests")]:
        del sys.modules[name]
    os.chdir(root)
    os.environ["PYTHONPATH"] = str(root)
    sys.path.insert(0, str(root))
    sys.dont_write_bytecode = True
    with log.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    sys.exit(int(pytest.main([*OPTIONS, *tests])))


def run_tests(root: Path, tests: Sequence[str], seconds: float = SECONDS) -> tuple[str, str]:
    """("passed" | "failed" | "error", last words) of tests run on the package under `root`."""
    log = root / "log.txt"
    process = PROCESSES.Process(target=run_pytest, args=(root, tests, log))
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
        return "error", f"still running after {seconds} s"
    text = log.read_text()
    words = [line for line in text.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if process.exitcode == 0:
        return "passed", ""
    return "failed" if process.exitcode == 1 else "error", words[0].split(" - ")[0] if words else text.strip()[-500:]


def copies(number: int, directory: Path) -> queue.Queue[Path]:
    """As many copies of what the tests need."""
    made: queue.Queue[Path] = queue.Queue()
    for index in range(number):
        root = directory / str(index)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
            else:
                shutil.copy(ROOT / name, root / name)
        made.put(root)
    return made


def check(mutation: Mutation, free: queue.Queue[Path]) -> tuple[str, str, float]:
    """What became of a bug: "caught", "SURVIVED" or "ERROR", by which test, after how many seconds."""
    root, started = free.get(), time.monotonic()
    try:
        before = mutation.apply(root)
        try:
            outcome, words = run_tests(root, mutation.tests)
        finally:
            (root / "fastkv" / mutation.file).write_text(before)
    except ValueError as error:
        outcome, words = "error", str(error)
    finally:
        free.put(root)
    verdict = {"failed": "caught", "passed": "SURVIVED"}.get(outcome, "ERROR")
    words = words.removeprefix("FAILED tests/") if verdict == "caught" else words.replace("\n", " ")
    return verdict, words, time.monotonic() - started


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__.split("\n")[0])
    parser.add_argument("--jobs", type=int, default=2, help="bugs tried at once (default 2)")
    parser.add_argument("--out", type=Path, help="also write the table to this file")
    parser.add_argument("--only", default="", help="bugs whose file or description contains this text")
    options = parser.parse_args(arguments)
    chosen = [one for one in MUTATIONS if options.only in f"{one.file} {one.what}"]
    if not chosen:
        raise SystemExit(f"no bug's file or description contains {options.only!r}; leave --only away to try all")
    os.environ["TRITON_INTERPRET"] = "1"  # as in conftest, which comes too late where triton is imported already
    PROCESSES.set_forkserver_preload(PRELOADED)
    lines = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(options.jobs) as pool:
        free = copies(options.jobs, Path(directory))
        tests = sorted({test for one in chosen for test in one.tests})
        root = free.get()
        unchanged = pool.submit(run_tests, root, tests, 10 * SECONDS)
        unchanged.add_done_callback(lambda _: free.put(root))
        caught = 0
        for one, (verdict, words, seconds) in zip(chosen, pool.map(lambda one: check(one, free), chosen)):
            caught += verdict == "caught"
            say(f"{verdict:8}  {seconds:4.0f} s  {one.file:28}  {one.what:62}  {words}")
        outcome, words = unchanged.result()
    sound = "pass" if outcome == "passed" else f"do not pass: {words}"
    say(f"{caught} of {len(chosen)} bugs caught; without a bug the tests {sound}")
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")
    return int(caught < len(chosen) or outcome != "passed")


if __name__ == "__main__":
    sys.exit(main())
