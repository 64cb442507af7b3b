"""Compiles every kernel for a GPU on a machine that has none: what the interpreter lets pass, the compiler may not.

`python tests/kernels_compiled.py CAPABILITY` prints one JSON object a kernel. Not in the interpreter.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from engine.kernels import guarded_triton, ownership_triton, pages_triton

I32, I64, STRIDE = "i32", "i64", "stride"
INTS, LONGS = "*i32", "*i64"
DIVISIBLE = [["tt.divisibility", 16]]


def compiled(kernel: Any, capability: int, types: dict[str, str], constants: dict[str, Any], **options: int) -> None:
    """Pointers and strides are taken to be multiples of 16, as a pool's are."""
    assert types.keys() | constants.keys() == set(kernel.arg_names), set(kernel.arg_names) ^ {*types, *constants}
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        kind = types.get(name, "constexpr")
        if kind == STRIDE or kind.startswith("*"):
            attributes[(place,)] = DIVISIBLE
        signature[name] = I32 if kind == STRIDE else kind
    source = ASTSource(kernel, signature, constexprs=constants, attrs=attributes)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = binary.asm["ptx"]
    print(
        json.dumps(
            {
                "kernel": kernel.__name__,
                "shared": binary.metadata.shared,
                "volatile": ptx.count("ld.volatile"),
                "async": ptx.count("cp.async.cg"),
                "release": ptx.count("atom.release.sys") + ptx.count("atom.sys.release")
                + ptx.count("atom.global.release.sys") + ptx.count("atom.global.sys.release"),
            }
        )
    )  # fmt: skip


def main(capability: int) -> None:
    for dtype in ("bf16", "fp16", "fp32"):
        strides = [f"{half}_{of}" for half in "kv" for of in ("page", "token", "head")] + ["q_row", "q_head"]
        types = {
            **dict.fromkeys(("q", "k", "v", "out"), f"*{dtype}"),
            **dict.fromkeys(("partial", "sums"), "*fp32"),
            **dict.fromkeys(("tables", "lengths", "starts", "news"), INTS),
            **dict.fromkeys(("expected", "tags"), LONGS),
            **dict.fromkeys(("pages", "width", "tiles", "parts", "heads"), I32),
            **dict.fromkeys(strides, STRIDE),
            "marks": "*u8",
            "scale": "fp32",
        }
        single = dtype == "fp32"
        for tile, guard, split in ((1, True, True), (1, False, True), (16, True, False)):
            constants = {
                "k_dim": 1, "v_dim": 1, "GROUP": 4, "HEAD_DIM": 128, "PADDED_DIM": 128, "PAGE_TOKENS": 16,
                "TILE": tile, "ROWS": max(16, 4 * tile), "BLOCK": 32 if single else 64, "SPAN": 4 if single else 8,
                "SPLIT": split, "GUARD": guard, "UPCAST": False, "PRECISION": "ieee" if single else "tf32",
            }  # fmt: skip
            stages = 3 if tile == 1 and not single else 2
            compiled(guarded_triton._attend, capability, types, constants, num_warps=4, num_stages=stages)
    compiled(
        guarded_triton._join, capability,
        {"partial": "*fp32", "sums": "*fp32", "out": "*bf16", "starts": INTS, "news": INTS,
         "most_new": I32, "parts": I32, "heads": I32},
        {"HEAD_DIM": 128, "PADDED_DIM": 128, "BLOCK": 16},
    )  # fmt: skip
    for ragged in (True, False):
        compiled(
            ownership_triton._check_rows, capability,
            {"tags": LONGS, "tables": INTS, "expected": LONGS, "rows": INTS, "refused": "*u8", "counts": INTS,
             "first": INTS, "first_page": LONGS, "pages": I32, "width": I32},
            {"RAGGED": ragged, "BLOCK": 128},
        )  # fmt: skip
    pool = {"pool": LONGS, "tags": LONGS, "pages": LONGS, "width": STRIDE}
    blocks = {"BLOCK": 1024, "ROUNDS": 8}
    compiled(pages_triton._write_pages, capability, {**pool, "data": LONGS, "new_tags": LONGS, "arrived": INTS}, blocks)
    compiled(pages_triton._scrub_pages, capability, pool, blocks)
    compiled(
        pages_triton._write_tokens, capability,
        {**dict.fromkeys(("k_pages", "v_pages", "k", "v"), "*bf16"), "tags": LONGS, "pages": LONGS, "places": INTS,
         "fresh": "*u8", "new_tags": LONGS, "kv_heads": I32,
         **dict.fromkeys(("k_page", "k_token", "k_head", "v_page", "v_token", "v_head"), STRIDE),
         **dict.fromkeys(("k_row", "k_row_head", "v_row", "v_row_head"), STRIDE)},
        {"k_dim": 1, "v_dim": 1, "HEAD_DIM": 128, "TAG": True, "BLOCK": 1024},
    )  # fmt: skip


if __name__ == "__main__":
    main(int(sys.argv[1]))
