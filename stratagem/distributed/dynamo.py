"""``torch.compile`` around a model of DDP looks into every Python function that runs meanwhile, also if C++ calls it.
``torch.compiler.disable`` would keep it out, but loads all of the compiler, and costs every call some time."""

from __future__ import annotations

import inspect
import types

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy


def keep_dynamo_out(owner: type) -> None:
    """Of the methods of a class."""
    skipped = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
    for function in vars(owner).values():
        if isinstance(function, types.FunctionType):
            for each in (function, inspect.unwrap(function)):
                set_code_exec_strategy(each.__code__, skipped)
