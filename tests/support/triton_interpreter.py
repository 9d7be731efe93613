"""Mistakes of Triton's interpreter, put right: kernels with loops over loaded bounds, products of bfloat16, and
numbers rounded to bfloat16, which it cuts off, and to FP8, where it forgets to carry into the exponent."""

from __future__ import annotations

import numpy as np
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
    convert_float = interpreter._convert_float
    rounded_dtypes = {tl.float8e4nv: torch.float8_e4m3fn, tl.bfloat16: torch.bfloat16}

    def convert_float_rightly(values, input_dtype, output_dtype, rounding_mode):
        if input_dtype == tl.float32 and output_dtype in rounded_dtypes:
            rounded = torch.from_numpy(np.ascontiguousarray(values).view(np.float32)).to(rounded_dtypes[output_dtype])
            bits = rounded.view(torch.uint8 if rounded.itemsize == 1 else torch.uint16)
            return bits.numpy().reshape(values.shape)
        return convert_float(values, input_dtype, output_dtype, rounding_mode)

    interpreter._convert_float = convert_float_rightly


if DEVICE.type == "cpu":
    _interpret()
