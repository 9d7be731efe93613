"""What Triton's interpreter gets wrong, put right: kernels with loops over loaded bounds, and products of bfloat16."""

from __future__ import annotations

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _interpret() -> None:
    import triton.language as tl
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor, scope):
        patch_tensor(tensor, scope)
        # NumPy 2.4 no longer makes an int of an array of one element, which is what a loaded scalar is here.
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index
    create_dot = interpreter.InterpreterBuilder.create_dot

    def create_dot_of_values(self, a, b, *rest):
        # bfloat16 lies in NumPy as uint16, of which the interpreter would multiply the bits.
        a, b = (self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return create_dot(self, a, b, *rest)

    interpreter.InterpreterBuilder.create_dot = create_dot_of_values


if DEVICE.type == "cpu":
    _interpret()
