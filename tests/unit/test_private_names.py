"""Tests look at production objects by public names: what they reach for behind an underscore is on a short list.

Not counted: `monkeypatch.setattr` with a name as text, by which bounds and block sizes of a module are made small.
"""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCTION = ("daemons", "kernels", "clients/python", "clients/cli")

# File below tests/, private name: why the test does not go by a public one.
ALLOWED = {
    ("kernels/test_decode_steps.py", "_launch"): "a rank without others, which launch() refuses",
    ("kernels/test_draft_trees.py", "_rank_kernel"): "a launch that its wrapper never makes",
    ("mesh/test_kv_store_tier.py", "_client"): "kills the store's server by the connection that it has",
    ("unit/test_cuda_parts.py", "_event"): "which event of the library is used again is nobody else's business",
    ("unit/test_fair_queue.py", "_lines"): "what cancelled entries leave in memory shows nowhere else",
    ("unit/test_guided_worker.py", "_matcher"): "breaks the library under one guide",
    ("unit/test_kv_store_disk.py", "_fd"): "ends a backend as a killed process does, without its close()",
    ("unit/test_kv_store_disk.py", "_lock_fd"): "ends a backend as a killed process does, without its close()",
    ("unit/test_link_placement.py", "_page_size"): "a link that has had no hello",
    ("unit/test_channel_names.py", "_OPTIONS"): "a channel of the library's own with the options of ours",
    ("unit/test_cublaslt.py", "_fields_"): "the public name in ctypes",
    ("unit/test_launchers.py", "_load_module_from_path"): "Triton's own",
    ("unit/test_shared_masks.py", "_guides"): "guides that no executor has admitted",
    ("support/ahead_of_warm_up.py", "_TIMEOUT_S"): "a bound that is made larger",
    ("kernels/test_page_copies.py", "_beside"): "buffers of a copy that a stand-in of a device counts",
    ("kernels/test_device_runner.py", "_launch_as_decodes"): "which of two ways a step takes shows in nothing else",
    **{
        ("kernels/test_cuda_host_pool.py", name): "copies that stand-ins of a device hold between their start and end"
        for name in ("_event", "_is_started", "_rows", "_saves")
    },
    **{
        ("support/mask_outputs.py", name): "reads what a device would, and counts rows that are lost"
        for name in ("_free", "_host", "_row_of_slot")
    },
    **{
        ("unit/test_mask_processes.py", name): "loses processes and their answers under what sends to them"
        for name in ("_ends", "_parts", "_reader", "_sent")
    },
}


def test_tests_reach_for_no_private_names_but_those_of_the_list() -> None:
    trees = (ast.parse(path.read_bytes()) for folder in PRODUCTION for path in (ROOT / folder).rglob("*.py"))
    private = {name for tree in trees for name in _defined(tree)}
    found = set()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        tree = ast.parse(path.read_bytes())
        if reached := _reached(tree) & private:
            file = path.relative_to(ROOT / "tests").as_posix()
            found |= {(file, name) for name in reached - _defined(tree)}
    assert not found - ALLOWED.keys(), "name it without an underscore, or say in ALLOWED why not"
    assert not ALLOWED.keys() - found, "these are reached for no more: take them off the list"


def _defined(tree: ast.Module) -> set[str]:
    """Private attributes, functions and names of a module that its code sets."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            names.add(node.attr)
    return {name for name in names if _is_private(name)}


def _reached(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not _is_self(node.value):
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("radixmesh"):
            names.update(alias.name for alias in node.names)
    return {name for name in names if _is_private(name)}


def _is_self(value: ast.expr) -> bool:
    is_super = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "super"
    return is_super or (isinstance(value, ast.Name) and value.id in ("self", "cls"))


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_replace"  # a tuple's: public
