from __future__ import annotations

import pytest

from app.models.layer_groups import MAX_GROUPS, layer_groups

GEMMA3 = "wwwwwf"


@pytest.mark.parametrize(
    ("layers", "sizes", "compiled"),
    [
        ("f" * 30, [10, 10, 10], 10),
        ("f" * 32, [8, 8, 8, 8], 8),
        ("f", [1], 1),
        ("f" * 28, [7, 7, 7, 7], 7),
        ("f" * 31, [10, 10, 10, 1], 11),
        ("f" * 80, [20, 20, 20, 20], 20),
        ("wf" * 13, [8, 8, 8, 2], 10),  # gemma2 2b
        ("wf" * 12, [6, 6, 6, 6], 6),  # gpt_oss 20b
        ((GEMMA3 * 5)[:26], [12, 12, 2], 14),  # gemma3 1b
        ((GEMMA3 * 11)[:62], [18, 18, 18, 8], 26),  # gemma3 27b
        ("ddd" + "m" * 58, [20, 20, 20, 1], 41),  # deepseek_v3
    ],
)
def test_groups_are_few_and_leave_few_layers_to_compile(layers: str, sizes: list[int], compiled: int) -> None:
    groups = layer_groups(layers)

    assert len(groups) <= MAX_GROUPS
    assert [index for group in groups for index in range(group.start, group.stop)] == list(range(len(layers)))
    assert [group.stop - group.start for group in groups] == sizes
    assert sum(map(len, {layers[group] for group in groups})) == compiled
