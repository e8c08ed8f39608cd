"""Checks of what people give: a ConfigurationError where it is anything else."""

from __future__ import annotations

import collections.abc
import difflib
import functools
import inspect
import logging
import operator
import os
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, SupportsFloat, TypeVar

from stratagem.errors import ConfigurationError
from stratagem.tensorflow_names import way_out

logger = logging.getLogger(__name__)
warn_once = functools.cache(logging.Logger.warning)
"""Writes a line of a logger that was not written before in this process."""

_Function = TypeVar("_Function", bound=Callable[..., Any])
_RUNS_LATER = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
"""Flags of the code of functions whose call runs nothing yet."""
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_MANY = (collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection, list, tuple)
_WORDS: dict[Any, str] = {
    **{bool: "True or False", int: "a whole number", float: "a number", str: "a string", NoneType: "None"},
    **{os.PathLike: "a path", collections.abc.Callable: "a function"},
    **{collections.abc.Mapping: "a dict", **dict.fromkeys(_MANY, "a list")},
}
"""Kinds of arguments, for people; a class is called by its name."""


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """``value`` as an int, where it is one: of Python or of a library, no bool and no float."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ConfigurationError(f"expected {name} of at least {least}, a whole number, got {value!r}")
    if number > sys.maxsize:
        raise ConfigurationError(f"expected {name} of at most {sys.maxsize}, got {value!r}")
    return number


def whole_numbers(least: int = 1, **values: Any) -> None:
    """The same of several arguments by their names; None is taken for "not given"."""
    for name, value in values.items():
        if value is not None:
            whole_number(name, value, least)


def above_zero(**values: Any) -> None:
    """Each is a number above 0 (not-a-number is none), or None for "not given"."""
    for name, value in values.items():
        if value is not None and not (_is_number(value) and float(value) > 0):
            raise ConfigurationError(f"expected {name} above 0 or None, got {value!r}")


def told_path(path: str) -> str:
    """``path``, where other tasks are told it: messages are text. Raises ConfigurationError: its bytes are none."""
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(
            f"{path!r} cannot be told to other tasks: a byte of it is no UTF-8; name another folder, or rename it"
        ) from None
    return path


def check_kind(value: Any, *kinds: type) -> None:
    """``value`` is of one of these classes."""
    if not isinstance(value, kinds):
        names = " or ".join("None" if kind is NoneType else kind.__name__ for kind in kinds)
        raise ConfigurationError(f"expected {names}, got {value if isinstance(value, type) else type(value).__name__}")


def check_call(fn: Any, args: Any, kwargs: Any) -> None:
    """``fn(*args, **kwargs)`` can be meant. Raises ConfigurationError: ``fn`` is nothing that is called, or nothing
    that a call runs; ``args`` no tuple or list, ``kwargs`` no mapping. A tensor or a string would be taken apart."""
    if not callable(fn):
        raise ConfigurationError(f"expected a function, got {type(fn).__name__}")
    if getattr(getattr(fn, "__code__", None), "co_flags", 0) & _RUNS_LATER:
        raise ConfigurationError(f"expected a function that returns what it computes: {fn.__name__} has yield or async")
    if not isinstance(args, tuple | list):
        raise ConfigurationError(f"expected args as a tuple, (batch,) for one argument, got {type(args).__name__}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ConfigurationError(f"expected kwargs as a dict, got {type(kwargs).__name__}")


def uncompiled(fn: Any) -> Any:
    """``fn`` as it was before ``torch.compile``, if that made it of a function: of which a warning tells, once."""
    if getattr(fn, "_torchdynamo_disable", False) or not hasattr(fn, "_torchdynamo_orig_callable"):
        return fn
    warn_once(
        logger,
        "the step was compiled by torch.compile, which cannot compile what replicas, workers and parameter servers do "
        "in backward() and optimizer.step(): it runs uncompiled. Compile only the model, strategy.prepare(model, "
        "optimizer, torch_compile=True), and give run the plain step",
    )
    return fn._torchdynamo_orig_callable


def some_of(names: Sequence[str]) -> str:
    """The first three, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def nearest(word: str, known: Iterable[str]) -> str:
    """A clause that offers the known word nearest to ``word``, or all of them when none is near."""
    words = sorted(known)
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(words)}"


def known_arguments(function: _Function) -> _Function:
    """``function``, or a class with its constructor, which refuses what it has no argument for, with the way out.

    Arguments of Keras and TensorFlow that ask for what is done anyway are left out. Raises ConfigurationError: in the
    call: names the argument, and the nearest that there is.
    """
    if isinstance(function, type):
        function.__init__ = known_arguments(function.__init__)  # type: ignore[misc]
        return function
    parameters = inspect.signature(function).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    placed = [name for name, parameter in parameters.items() if parameter.kind in _BY_PLACE]
    takes_any = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters.values())
    called = function.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        for name in () if takes_all else [name for name in kwargs if name not in parameters]:
            hint = way_out(called, name, kwargs.pop(name))
            if hint is None or hint:
                known = parameters.keys() - {"self", "cls"}
                raise ConfigurationError(f"{called}() has no argument {name!r}; {hint or nearest(name, known)}")
        if len(args) > len(placed) and not takes_any:
            names = ", ".join(name for name in placed if name not in ("self", "cls")) or "nothing"
            raise ConfigurationError(f"{called}() takes {names} by position, but got more: give arguments by name")
        return function(*args, **kwargs)

    return typing.cast(_Function, call)


def checked(function: _Function) -> _Function:
    """``function``, or a class with its constructor, whose arguments are of the kinds that their annotations say before
    anything is done with them.

    A number may be one of numpy or torch, True is none, and a string is no list. What an annotation says of elements
    and literals is left to the function. What has no such argument is refused, see :func:`known_arguments`. Raises
    ConfigurationError: in the call: names the argument, what it takes and what came.
    """
    if isinstance(function, type):
        function.__init__ = checked(function.__init__)  # type: ignore[misc]
        return function
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # Python's own error names the function
        hints = _hints_of(function)
        for name, value in bound.arguments.items():
            kind = signature.parameters[name].kind
            given = value.items() if kind is inspect.Parameter.VAR_KEYWORD else [(name, value)]
            for key, one in given if name in hints and kind is not inspect.Parameter.VAR_POSITIONAL else ():
                if not any(_takes(hint, one) for hint in hints[name]):
                    came = repr(one) if isinstance(one, str | int | float | NoneType) else f"a {type(one).__name__}"
                    came = f"the class {one.__name__}" if isinstance(one, type) else came
                    raise ConfigurationError(f"expected {key}= {_in_words(hints[name])}, got {came}")
        return function(*args, **kwargs)

    return known_arguments(typing.cast(_Function, call))


@functools.cache
def _hints_of(function: Callable[..., Any]) -> dict[str, tuple[Any, ...]]:
    """What each argument may be. Resolved at the first call, when all that annotations name is loaded.

    What may be given by a name or as a class (an enum, a device, an optimizer) is left out: who looks it up knows the
    names, and says them.
    """
    hints = {name: tuple(_members(hint)) for name, hint in typing.get_type_hints(function).items() if name != "return"}
    named = [name for name, kinds in hints.items() if str in kinds and not _WORDS.keys() >= {*kinds}]
    return {name: kinds for name, kinds in hints.items() if type not in kinds and name not in named}


def _members(hint: Any) -> Iterator[Any]:
    """Of a union; of literals their classes."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, UnionType):
        for one in typing.get_args(hint):
            yield from _members(one)
    elif origin is typing.Literal:
        yield from {type(value) for value in typing.get_args(hint)}
    else:
        yield origin or hint


def _takes(kind: Any, value: Any) -> bool:
    if kind is bool:
        return isinstance(value, bool) or type(value).__name__ == "bool"  # numpy's
    if kind is int:
        return _gives(operator.index, value)
    if kind is float:
        return _is_number(value)
    if kind in _MANY:
        return isinstance(value, kind) and not isinstance(value, str | bytes | Mapping)
    is_class = isinstance(kind, type) and kind is not Any
    is_told = is_class and (not getattr(kind, "_is_protocol", False) or getattr(kind, "_is_runtime_protocol", False))
    return not is_told or isinstance(value, kind)


def _is_number(value: Any) -> bool:
    """Of Python or of a library; no bool."""
    return isinstance(value, SupportsFloat) and _gives(float, value)


def _gives(convert: Callable[[Any], float], value: Any) -> bool:
    try:
        return not isinstance(value, bool) and convert(value) is not None
    except (TypeError, ValueError, RuntimeError):  # a class, a tensor of several elements
        return False


def _in_words(kinds: tuple[Any, ...]) -> str:
    named = [kind for kind in kinds if not (kind is str and os.PathLike in kinds)]
    return " or ".join(dict.fromkeys(_WORDS.get(kind) or str(getattr(kind, "__name__", kind)) for kind in named))


def is_metric(item: Any) -> bool:
    """Whether it is of torchmetrics, which is loaded then."""
    torchmetrics = sys.modules.get("torchmetrics")
    return torchmetrics is not None and isinstance(item, torchmetrics.Metric | torchmetrics.MetricCollection)
