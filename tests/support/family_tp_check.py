"""Run in a process of its own with 8 CPU devices: families cut over 1, 2 and 4 devices. Prints their logits."""

from __future__ import annotations

import json
import sys

from app.tpu.mesh import make_mesh
from tests.support.golden_models import golden_model
from tests.support.hybrid_rig import HybridRows, hybrid_spec, open_hybrid

# qwen3_next has two key heads in its recurrent layers, which cannot be cut further.
SIZES = {
    "gemma3_text": (1, 2, 4),
    "gpt_oss": (1, 2, 4),
    "qwen3_moe": (1, 2, 4),
    "deepseek_v3": (1, 2, 4),
    "qwen3_next": (1, 2),
    "falcon_h1": (1, 2, 4),
    "falcon_h1_gated_norm": (1, 4),
}


def run(name: str, tp_size: int) -> list[list[float]]:
    model = golden_model(name)
    spec = hybrid_spec(model.config, page_size=16, num_pages=4, num_rows=1, tp_size=tp_size)
    runner = open_hybrid(model.config, model.source(), spec, tp_size=tp_size)
    rows = HybridRows(runner, model.config, spec, make_mesh(tp_size, "cpu"), num_rows=1, num_pages=4)
    tokens = model.sequences[0]
    found = [rows.extend([0], [tokens[:30]], [0], num_tokens=32)[0], rows.decode([0], [int(tokens[30])], [31])[0]]
    return [logits.tolist() for logits in found]


if __name__ == "__main__":
    (name,) = sys.argv[1:]
    print(json.dumps({str(tp_size): run(name, tp_size) for tp_size in SIZES[name]}))
