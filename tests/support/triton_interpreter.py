"""Mistakes of Triton's interpreter, put right: kernels with loops over loaded bounds, products of bfloat16, and
numbers rounded to bfloat16, which it cuts off, and to FP8, where it forgets to carry into the exponent.

Work that it throws away is left out, which halves its time.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
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


def _hurry() -> None:
    """Four things of which every operation of every program does a bit; none changes a result."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    # A function that a kernel calls patches Triton's language again for every call: once a launch and module will do.
    patched: set[int] = set()
    launch = interpreter.GridExecutor.__call__

    def launch_anew(self, *args, **kwargs):
        patched.clear()
        return launch(self, *args, **kwargs)

    def call(self, *args, **kwargs):
        if id(self.fn.__globals__) not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(id(self.fn.__globals__))
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter.GridExecutor.__call__ = launch_anew
    interpreter.InterpretedFunction.__call__ = call

    # The overflow of every sum and product is computed, and asserted only where the option `debug` is set.
    check_overflow = TritonSemantic.binary_op_sanitize_overflow_impl

    def check_overflow_in_debug(self, lhs, rhs, binary_op):
        if self.builder.options.debug:
            check_overflow(self, lhs, rhs, binary_op)

    TritonSemantic.binary_op_sanitize_overflow_impl = check_overflow_in_debug

    # A shape is a tuple whose type is made at once and hardly ever asked for.
    make_type = tl.core._type_for_tuple_values

    class LazyType:
        def __get__(self, owner, _):
            if owner.given_type is None:
                owner.given_type = make_type(owner.values)
            return owner.given_type

    def fill(self, args, type=None):
        self.values = list(args)
        self.given_type = type if type is None or isinstance(type, tl.core.tuple_type) else tl.core.tuple_type(type)

    tl.core.tuple.__init__ = fill
    tl.core.tuple.type = LazyType()

    # A table of all dtypes is built for each look into it.
    find_dtype, dtypes = interpreter._get_np_dtype, {}

    def find_dtype_once(tt_dtype):
        scalar = tt_dtype.element_ty if isinstance(tt_dtype, tl.block_type) else tt_dtype
        name = scalar.name
        if name not in dtypes:
            dtypes[name] = find_dtype(scalar)
        return dtypes[name]

    interpreter._get_np_dtype = find_dtype_once


def launch_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are threads launch one kernel at a time: the interpreter has one grid for all of them."""
    from triton.runtime import interpreter

    lock, launch = threading.Lock(), interpreter.GridExecutor.__call__

    def launch_alone(self: object, *args: object, **kwargs: object) -> object:
        with lock:
            return launch(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_alone)


if DEVICE.type == "cpu":
    _interpret()
    _hurry()
