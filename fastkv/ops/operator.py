"""How an operation becomes one opaque torch operator: objects are flattened here, once, from their own description.

A function of tensors, a `LayerState` and a `Spec` is registered as `torch.ops.fastkv.<its name>` with a schema made of
its annotations; most are functions of the reference, which `by_spec` and `by_keyword` hand to a backend. A state
travels as the list of its tensors, their names and the numbers the host knows of its slots, a spec as text. Declared
mutation and a fake implementation make it compile, graph-capture and pass `opcheck`.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .. import corrections, reference
from ..backend import follows_rows, implementation, resolve
from ..reference import Evicted, LayerState, Moments, RowFormat, Selection, Slots, Spec, Stored
from ..rotary import Rotary

LIBRARY = torch.library.Library("fastkv", "DEF")
Function = TypeVar("Function", bound=Callable[..., Any])
Result = TypeVar("Result")
FORMAT = "slots="  # before what names say of how slots are stored, if it is not plainly
Block = tuple[Tensor, Tensor, Tensor]

PLAIN: dict[Any, str] = {Tensor: "Tensor", float: "float", int: "int", str: "str", bool: "bool"}
PLAIN |= {kind | None: f"{PLAIN[kind]}?" for kind in (Tensor, float, int)}
RETURNS = {type(None): "()", Tensor: "Tensor", Selection: "(Tensor, Tensor)"}
ATTRIBUTES = {
    kind: tuple(one.name for one in fields(kind) if one.name not in LayerState.BORROWED)
    for kind in (LayerState, Slots, reference.Recovery, *Evicted.kinds.values())  # type: ignore[arg-type]
}


def flat_parts(prefix: str, owner: Any) -> tuple[list[Tensor], str]:
    """The tensors of a dataclass and their names, side by side."""
    names = [name for name in ATTRIBUTES[type(owner)] if isinstance(getattr(owner, name), Tensor)]
    return [getattr(owner, name) for name in names], " ".join(prefix + name for name in names)


def flat_state(state: LayerState) -> tuple[list[Tensor], str, list[int]]:
    """The three arguments that a state becomes."""
    tensors: list[Tensor] = []
    names: list[str] = []
    recovery = [] if state.recovery is None else [("recovery.", state.recovery)]
    for prefix, owner in (*state.owners(), *recovery):
        more, called = flat_parts(prefix, owner)
        tensors += more
        names += called.split()
    if state.sink_logits is not None:
        tensors.append(state.sink_logits.detach())  # a parameter of the model; no gradient passes through operators
        names.append("sink_logits")
    if state.rows is not None:
        tensors.append(state.rows)
        names.append("rows")
    if not state.exact.format.plain:
        exact = state.exact
        names.append(f"{FORMAT}{exact.format.name} {str(exact.dtype).removeprefix('torch.')} {exact.codec.backend}")
    numbers = [number for tier in state.tiers.values() for number in (tier.filled, tier.limit, tier.value_dim)]
    return tensors + state.scratch, " ".join(names), numbers


def state_of(tensors: list[Tensor], names: str, numbers: list[int]) -> LayerState:
    """The inverse of `flat_state`; tensors without a name are scratch."""
    found: dict[str, dict[str, Any]] = {}
    names, _, form = names.partition(f" {FORMAT}")
    called = names.split()
    for name, tensor in zip(called, tensors):
        owner, _, attribute = name.rpartition(".")
        found.setdefault(owner, {})[attribute] = tensor
    filled, limit, value_dim = numbers[:3]
    if form:
        named, dtype, backend = form.split()
        found["exact"] |= {
            "format": reference.FORMATS[named],
            "decodes_to": getattr(torch, dtype),
            "codec": BackendCodec(backend),
        }
    exact = Slots(**{"values": None, **found["exact"]}, filled=filled, limit=limit, value_dim=value_dim)
    state = LayerState(exact, found[""]["seen"], Moments(**found["moments"]), scratch=list(tensors[len(called) :]))
    if "approx" in found:
        state.approx = Slots(**{"values": None, **found["approx"]}, filled=numbers[3], limit=numbers[4])
    for name in ("sink_logits", "rows"):
        setattr(state, name, found[""].get(name))
    if "recovery" in found:
        state.recovery = reference.Recovery(**found["recovery"])
    for kind in found.keys() & Evicted.kinds.keys() - {"moments"}:
        state.parts = Evicted.kinds[kind](**found[kind])
    return state


def spec_text(spec: Spec) -> str:
    """The argument that a spec becomes."""
    name = None if spec.correction is None else spec.correction.name
    return f"{spec.scale} {spec.softcap} {name} {spec.backend} {spec.tokens} {spec.spare} {spec.sinks} {spec.recent}"


@functools.lru_cache(maxsize=1024)
def spec_of(text: str) -> Spec:
    """The inverse of `spec_text`."""
    scale, softcap, name, backend, *numbers = text.split()
    return Spec(
        float(scale),
        None if softcap == "None" else float(softcap),
        None if name == "None" else corrections.get(name),
        backend,
        *map(int, numbers),
    )


def moments_of(tensors: list[Tensor], names: str) -> Moments:
    """The inverse of `flat_parts`."""
    return Moments(**dict(zip(names.split(), tensors)))


def flat_rotary(rotary: Rotary | None) -> tuple[Tensor | None, float, bool, int]:
    """The four arguments that a rotary embedding becomes."""
    if rotary is None:
        return None, 1.0, False, 0
    return rotary.frequencies, rotary.scaling, rotary.interleaved, rotary.start


def rotary_of(frequencies: Tensor | None, *rest: Any) -> Rotary | None:
    """The inverse of `flat_rotary`."""
    return None if frequencies is None else Rotary(frequencies, *rest)


class Form(NamedTuple):
    """How arguments of one type travel: schema, where $ stands for the name and @ for the mutation, and both ways."""

    schema: tuple[str, ...]
    there: Callable[..., tuple[Any, ...]]
    back: Callable[..., Any]


FORMS: dict[Any, Form] = {
    **{
        kind: Form((f"{name}{'@' * (kind is Tensor)} $",), lambda one: (one,), lambda one: one)
        for kind, name in PLAIN.items()
    },
    LayerState: Form(("Tensor@[] $", "str $_names", "SymInt[] $_numbers"), flat_state, state_of),
    Moments: Form(("Tensor@[] $", "str $_names"), functools.partial(flat_parts, ""), moments_of),
    **{
        kind: Form(("Tensor? $", "float $_scaling", "bool $_interleaved", "int $_start"), flat_rotary, rotary_of)
        for kind in (Rotary, Rotary | None)
    },
    Spec: Form(("str $",), lambda spec: (spec_text(spec),), spec_of),
    Selection: Form(("Tensor[] $",), lambda selection: (list(selection),), lambda rows: Selection(*rows)),
    Block | None: Form(("Tensor[] $",), lambda block: (list(block or ()),), lambda rows: tuple(rows) or None),
}


@functools.cache
def several_devices() -> bool:
    """Whether this process sees more than one GPU."""
    return torch.cuda.device_count() > 1


def device_of(arguments: tuple[Any, ...]) -> torch.device:
    """Where the tensors of flat arguments are: one alone, or in a list."""
    tensors = (one for given in arguments for one in (given if isinstance(given, (list, tuple)) else [given]))
    return next(one.device for one in tensors if isinstance(one, Tensor))


def on_own_device(function: Callable[..., Result]) -> Callable[..., Result]:
    """The function of flat arguments, on the GPU that has them.

    A Triton kernel is launched on the current device, whichever has its tensors; the layers of a model may be spread
    over several. Where there is but one GPU, nothing is asked.
    """

    @functools.wraps(function)
    def run(*arguments: Any) -> Result:
        if several_devices():
            device = device_of(arguments)
            if device.type == "cuda" and device.index != torch.cuda.current_device():
                with torch.cuda.device(device):
                    return function(*arguments)
        return function(*arguments)

    return run


def opaque(fake: Callable[..., Any], changes: tuple[str, ...] = ()) -> Callable[[Function], Function]:
    """Register the decorated function as an operator for every device; calls go through it.

    Tensors on a CPU that no compiler or mode looks at go to the function itself: to pass some thirty arguments through
    the dispatcher is a part of a small decode step that shows.

    Args:
        fake: makes empty results; arguments as those of the function.
        changes: arguments whose tensors the function changes.
    """

    def register(function: Function) -> Function:
        name, hints = function.__name__, typing.get_type_hints(function)
        parameters = inspect.signature(function).parameters
        kinds = tuple(hints[parameter] for parameter in parameters)
        pieces = []
        for number, (parameter, kind) in enumerate(zip(parameters, kinds)):
            mark = f"({chr(97 + number)}!)" if parameter in changes else ""
            pieces += [piece.replace("$", parameter).replace("@", mark) for piece in FORMS[kind].schema]
        returned = hints["return"]
        kind_of_result = RETURNS.get(returned) or f"({', '.join(PLAIN[one] for one in typing.get_args(returned))})"
        LIBRARY.define(f"{name}({', '.join(pieces)}) -> {kind_of_result}")
        widths = tuple(len(FORMS[kind].schema) for kind in kinds)

        def on_flat(wrapped: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                given, start = [], 0
                for kind, width in zip(kinds, widths):
                    given.append(FORMS[kind].back(*arguments[start : start + width]))
                    start += width
                return wrapped(*given)

            return call

        def positional(*arguments: Any) -> Any:
            bare = dict(zip(parameters, arguments))
            order = [p for p in parameters if parameters[p].kind is not inspect.Parameter.KEYWORD_ONLY]
            return function(*(bare[p] for p in order), **{p: bare[p] for p in bare if p not in order})

        LIBRARY.impl(name, on_own_device(on_flat(positional)), "CompositeExplicitAutograd")
        torch.library.register_fake(f"fastkv::{name}", on_flat(fake), lib=LIBRARY)
        registered = getattr(torch.ops.fastkv, name)
        defaults = tuple((parameter, parameters[parameter].default) for parameter in parameters)

        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            first = next((a for a in (*arguments, *options.values()) if isinstance(a, Tensor)), None)
            looked_at = torch.compiler.is_compiling() or is_in_torch_dispatch_mode()
            if type(first) is Tensor and first.is_cpu and not looked_at:
                return function(*arguments, **options)
            rest = dict(defaults[len(arguments) :]) | options
            wanted = len(arguments) + len(rest) == len(defaults)
            if not wanted or any(one is inspect.Parameter.empty for one in rest.values()):
                got = ", ".join((f"{len(arguments)} by place", *options))
                raise TypeError(f"{name}() takes {', '.join(parameters)}, each once, got {got}")
            given: list[Any] = []
            for kind, argument in zip(kinds, (*arguments, *rest.values())):
                given.extend(FORMS[kind].there(argument))
            result = registered(*given)
            return Selection(*result) if returned is Selection else result

        return call  # type: ignore[return-value]

    return register


def by_spec(function: Function, changes: bool = True) -> Function:
    """A function of the reference as the backend has it that its last argument, a `Spec`, names.

    The argument before it is a state. Where the batch lives in chosen rows of it, and the backend does not follow them
    itself, the function works on a copy of those rows: that defines what an operation does with rows.

    Args: changes: whether the function changes the state.
    """
    name = function.__name__

    @functools.wraps(function)
    def run(*arguments: Any) -> Any:
        *given, state, spec = arguments
        device = state.seen.device.type
        chosen = implementation(name, spec.backend, device)
        if state.rows is None or follows_rows(name, spec.backend, device):
            return chosen(*arguments)
        with state.gathered(changes) as own:
            return chosen(*given, own, spec)

    return run  # type: ignore[return-value]


def by_keyword(function: Callable[..., Result]) -> Callable[..., Result]:
    """A function of the reference as the backend has it that one more argument names, `backend="auto"`."""
    signature = inspect.signature(function)
    backend = inspect.Parameter("backend", inspect.Parameter.KEYWORD_ONLY, default="auto", annotation="str")
    names = tuple(signature.parameters)
    known = frozenset(names)
    defaults = {name: one.default for name, one in signature.parameters.items() if one.default is not one.empty}

    @functools.wraps(function)
    def run(*arguments: Any, backend: str = "auto", **options: Any) -> Result:
        told = dict(zip(names, arguments)) | options
        given = defaults | told
        if len(told) < len(arguments) + len(options) or given.keys() != known:
            signature.bind(*arguments, **options)  # raises: it says what is wrong, but takes as long as a kernel
        device = next(one.device for one in given.values() if isinstance(one, Tensor))
        chosen: Callable[..., Result] = implementation(function.__name__, backend, device.type)
        return chosen(**given)

    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), backend])  # type: ignore[attr-defined]
    run.__annotations__ = {**function.__annotations__, "backend": "str"}
    return run


def nothing(*arguments: Any) -> None:
    """Fake of an operator that only changes its arguments."""


@dataclass(frozen=True)
class BackendCodec(reference.Codec):
    """That of a backend, which may be "auto": C++ on a CPU. On a GPU kernels convert most rows by themselves."""

    def encode(self, form: RowFormat, rows: Tensor) -> Stored:
        """`form.encode`."""
        if not self._compiled(rows):
            return super().encode(form, rows)
        return implementation("encode_rows", "cpu", "cpu")(form, rows)

    def decode(self, form: RowFormat, codes: Tensor, scales: Tensor | None, dtype: torch.dtype) -> Tensor:
        """`form.decode`, in that dtype."""
        if not self._compiled(codes):
            return super().decode(form, codes, scales, dtype)
        return implementation("decode_rows", "cpu", "cpu")(form, codes, scales, dtype)

    def read(self, slots: reference.Slots, names: Sequence[str], dtype: torch.dtype) -> list[Tensor] | None:
        """All at once."""
        compiled: list[Tensor] | None = None
        if self._compiled(slots.keys):
            compiled = implementation("read_slots", "cpu", "cpu")(slots, names, dtype)
        return compiled

    def _compiled(self, rows: Tensor) -> bool:
        """Whether C++ converts these; torch compiles a step whole, and leaves nothing to C++."""
        return resolve(self.backend, rows.device) == "cpu" and not torch.compiler.is_compiling()
