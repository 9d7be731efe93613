"""Objects that an object keeps alive: for tests that nothing is left behind, whatever holds it."""

from __future__ import annotations

import gc
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, ModuleType

# Leads out of the object: classes, code, and whoever happens to run.
_NOT_ITS_OWN = (type, ModuleType, FunctionType, BuiltinFunctionType, CodeType, FrameType)


def num_reachable(root: object) -> int:
    """Objects that can be reached from `root`, itself counted; code and classes are not."""
    seen = {id(root)}
    rest = [root]
    while rest:
        for other in gc.get_referents(rest.pop()):
            if id(other) not in seen and not isinstance(other, _NOT_ITS_OWN):
                seen.add(id(other))
                rest.append(other)
    return len(seen)
