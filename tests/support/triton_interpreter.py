"""Mistakes of Triton's interpreter, put right: kernels with loops over loaded bounds, products of bfloat16, and
numbers rounded to bfloat16, which it cuts off, and to FP8, where it forgets to carry into the exponent.

Work that it throws away is left out, which halves its time.
"""

from __future__ import annotations

import ast
import sys
import threading

import numpy as np
import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _parse_in_turns() -> None:
    """Python before 3.11.8 and 3.12.2 counts the depth of syntax trees for all threads together, so one that parses
    while another does may end with a SystemError (python/cpython#106905). Ranks that are threads parse kernels so."""
    parse, lock = ast.parse, threading.RLock()

    def parse_alone(*args, **kwargs):
        with lock:
            return parse(*args, **kwargs)

    ast.parse = parse_alone


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

    # Each launch, and each function that a kernel calls, patches Triton's language, and a launch restores it: a third
    # of the time of small kernels. Once for each module of kernels will do: nothing else here uses the language.
    patched: dict[int, dict[str, object]] = {}
    patch_lang = interpreter._patch_lang

    class Kept:
        def restore(self):
            pass

    kept = Kept()

    def patch_once(fn):
        if id(fn.__globals__) not in patched:
            patch_lang(fn)
            patched[id(fn.__globals__)] = fn.__globals__
        return kept

    def call(self, *args, **kwargs):
        patch_once(self.fn)
        try:
            return self.rewrite()(*args, **kwargs)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_lang = patch_once
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
    _share_types()
    _combine_rows()


def _share_types() -> None:
    """Shapes are few: what types and tensors say of one is made once. Operands that are alike need no conversion."""
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    core = tl.core
    block_type, tensor, constexpr = core.block_type, core.tensor, core.constexpr
    make_block_type, equal_dtypes = block_type.__init__, core.dtype.__eq__
    # By sizes: shape and number of elements, as a type has them.
    shapes: dict[tuple[int, ...], tuple[object, int]] = {}
    # By the shape of a type: as a tensor has them.
    of_tensors: dict[int, tuple[object, object]] = {}
    no_shape = core.tuple([]), constexpr(1)

    def fill_block_type(self, element_ty, shape):
        sizes = tuple(shape)
        if (known := shapes.get(sizes)) is None:
            make_block_type(self, element_ty, shape)
            sizes = tuple(self.shape.values)
            known = shapes.setdefault(sizes, (self.shape, self.numel))
            of_tensors[id(known[0])] = core.tuple([constexpr(size) for size in sizes]), constexpr(self.numel)
        self.element_ty = element_ty
        self.shape, self.numel = known

    class LazyName:
        def __get__(self, owner, _):
            return f"<{owner.shape}, {owner.element_ty}>"

    def fill_tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensors[id(type.shape)] if type.is_block() else no_shape

    block_type.__init__, block_type.name = fill_block_type, LazyName()
    tensor.__init__ = fill_tensor
    core.dtype.__eq__ = lambda self, other: self is other or equal_dtypes(self, other)

    def have_one_shape(left, right):
        is_block = left.is_block()
        return is_block == right.is_block() and (not is_block or left.shape is right.shape)

    check_operands = TritonSemantic.binary_op_type_checking_impl

    broadcast, cast = TritonSemantic.broadcast_impl_value, TritonSemantic.cast
    # By dtypes: what both are cast to. By a number, and dtype and shape of the tensor that it meets: its own tensor.
    promoted: dict[tuple[str, str, bool], object] = {}
    numbers: dict[tuple[object, ...], object] = {}

    def check_unlike_operands(
        self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False
    ):
        rest = allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        if lhs.__class__ is not tensor:
            return check_operands(self, lhs, rhs, *rest)
        dtype, of = lhs.dtype, rhs.__class__
        if of is tensor:
            other = rhs.dtype
            if dtype.is_ptr() or other.is_ptr() or not arithmetic_check:
                return check_operands(self, lhs, rhs, *rest)
            if dtype is other and not div_or_mod:
                return (lhs, rhs) if have_one_shape(lhs.type, rhs.type) else broadcast(self, lhs, rhs)
            key = dtype.name, other.name, div_or_mod
            if (common := promoted.get(key)) is None:
                common = promoted[key] = self.computation_type_impl(dtype, False, other, False, div_or_mod)
            return self.broadcast_impl_value(self.cast(lhs, common), self.cast(rhs, common))
        # Zeros of both signs are one key.
        if of is not int and (of is not float or rhs == 0.0):
            return check_operands(self, lhs, rhs, *rest)
        key = rhs, of, dtype.name, id(lhs.type.shape) if lhs.type.is_block() else None, *rest
        if (number := numbers.get(key)) is not None:
            return lhs, number
        left, number = check_operands(self, lhs, rhs, *rest)
        if left is lhs:
            number.handle.data.flags.writeable = False
            if len(numbers) > 4096:
                numbers.clear()
            numbers[key] = number
        return left, number

    TritonSemantic.binary_op_type_checking_impl = check_unlike_operands

    def broadcast_unlike(self, lhs, rhs):
        return (lhs, rhs) if have_one_shape(lhs.type, rhs.type) else broadcast(self, lhs, rhs)

    def cast_other(self, input, dst_ty, fp_downcast_rounding=None):
        return input if input.dtype is dst_ty.scalar else cast(self, input, dst_ty, fp_downcast_rounding)

    TritonSemantic.broadcast_impl_value, TritonSemantic.cast = broadcast_unlike, cast_other

    # The result of an operation is checked to be no wider than its type, as before; pointers are not.
    pointer_type, handle = core.pointer_type, interpreter.TensorHandle

    def fill_handle(self, data, dtype, attr=None):
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if dtype.__class__ is not pointer_type and data.itemsize > 1 and data.itemsize * 8 > dtype.primitive_bitwidth:
            self.__post_init__()

    handle.__init__ = fill_handle

    # Asked of nearly every value, most of which are of these classes.
    unwrap, plain = core._unwrap_if_constexpr, {int, float, bool, str, tensor, core.dtype, block_type, type(None)}

    def unwrap_if_constexpr(value):
        if (of := value.__class__) is constexpr:
            return value.value
        return value if of in plain else unwrap(value)

    core._unwrap_if_constexpr = unwrap_if_constexpr

    # Each call of the language goes through a wrapper that asks whether the semantic was given, which it is here.
    checks_semantic = core.cast.__code__

    def patch_attr(obj, name, member, builder, scope):
        semantic = TritonSemantic(builder)
        inner = member.__wrapped__ if getattr(member, "__code__", None) is checks_semantic else member

        def call(*args, **kwargs):
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = patch_attr


def _combine_rows() -> None:
    """A reduction or a scan with a function of its own goes element by element: here all that lie beside each other
    along the other axes go at once, in the same order along the own one."""
    import triton.language as tl
    from triton.runtime import interpreter

    def combined(ops, inputs, axis):
        """Per step along the axis, the arrays that have been combined up to it."""
        dtypes = [given.dtype for given in inputs]
        arrays = [np.moveaxis(given.handle.data, axis, 0) for given in inputs]
        sums = [array[0] for array in arrays]
        yield sums
        for number in range(1, len(arrays[0])):
            each = [ops.to_tensor(array, dtype) for array, dtype in zip(sums, dtypes, strict=True)]
            rows = [ops.to_tensor(array[number], dtype) for array, dtype in zip(arrays, dtypes, strict=True)]
            found = ops.combine_fn.fn(*each, *rows)
            found = found if isinstance(found, tuple) else (found,)
            values = [one.handle.data if isinstance(one, tl.core.tensor) else one for one in found]
            sums = [
                np.asarray(value, dtype=array.dtype).reshape(array.shape[1:])
                for value, array in zip(values, arrays, strict=True)
            ]
            yield sums

    def reduce(self, input):
        inputs, axis = self.unravel(input, self.axis)
        *_, sums = combined(self, inputs, axis)
        if self.keep_dims:
            kept = (axis,) if self.axis is not None else tuple(range(len(input[0].handle.data.shape)))
            sums = [np.expand_dims(array, kept) for array in sums]
        elif self.axis is None:
            sums = [array.item() for array in sums]
        return [self.to_tensor(array, given.dtype) for array, given in zip(sums, inputs, strict=True)]

    def scan(self, input):
        steps = list(combined(self, input, self.axis))
        arrays = [np.stack(of_steps, axis=self.axis) for of_steps in zip(*steps, strict=True)]
        return [self.to_tensor(array, given.dtype) for array, given in zip(arrays, input, strict=True)]

    interpreter.ReduceOps.generic_reduce = reduce
    interpreter.ScanOps.generic_scan = scan


def launch_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are threads launch one kernel at a time: the interpreter has one grid for all of them."""
    from triton.runtime import interpreter

    lock, launch = threading.Lock(), interpreter.GridExecutor.__call__

    def launch_alone(self: object, *args: object, **kwargs: object) -> object:
        with lock:
            return launch(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch_alone)


if DEVICE.type == "cpu":
    if sys.version_info < (3, 11, 8) or (3, 12) <= sys.version_info < (3, 12, 2):
        _parse_in_turns()
    _interpret()
    _hurry()
