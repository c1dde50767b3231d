"""Figures, tables, pictures and comparisons of hand-made rows."""

from __future__ import annotations

import io
import struct
from typing import Any

import msgspec
import pytest
from rich.console import Console

from app.bench.serve.compare import check_comparable, compare
from app.bench.serve.failures import IncomparableError
from app.bench.serve.picture import HEIGHT, WIDTH, draw_picture
from app.bench.serve.result import VERSION, RequestRow, RunResult, ServerRecord, read_result, write_result
from app.bench.serve.summary import spread, summarise
from app.bench.serve.table import print_comparison, print_run
from app.errors import ConfigError


def row(number: int, **changed: Any) -> RequestRow:
    """Sent at 10 s, first text at 10.5, two more at 10.7 and 11.1, ended at 11.2; half of 100 tokens cached."""
    values = {
        "request": number,
        "conversation": f"c{number}",
        "turn": 0,
        "due_s": 10.0,
        "sent_s": 10.0,
        "first_byte_s": 10.1,
        "delta_s": [10.5, 10.7, 11.1],
        "end_s": 11.2,
        "prompt_tokens": 100,
        "completion_tokens": 7,
        "cached_tokens": 50,
        "ideal_cached_tokens": 80,
        "finish_reason": "length",
        "failure": None,
        "failure_message": None,
    }
    return RequestRow(**{**values, **changed})


FAILED = {"failure": "refused 503", "failure_message": "full", "delta_s": [], "end_s": 99.0, "prompt_tokens": 0}


def result(rows: list[RequestRow], *, planned: int | None = None, server: dict | None = None, **changed) -> RunResult:
    record = {
        "url": "http://127.0.0.1:1",
        "model": "m",
        "cache_type": "radix_cache",
        "page_size": 16,
        "context_length": 1000,
        "info": {"cache_type": "radix_cache"},
    }
    values = {
        "version": VERSION,
        "started_at": "2026-01-01T00:00:00+00:00",
        "ending": "complete",
        "settings": {"workload": "agent", "concurrency": 4, "max_tokens": 16},
        "digest": "abc",
        "server": ServerRecord(**{**record, **(server or {})}),
        "notes": [],
        "loop_lag_s": 0.001,
        "summary": summarise(rows, len(rows) if planned is None else planned),
        "rows": rows,
    }
    return RunResult(**{**values, **changed})


def printed(draw, *args) -> str:
    console = Console(file=io.StringIO(), width=160)
    draw(*args, console)
    return console.file.getvalue()


class TestSummary:
    def test_every_figure_follows_from_the_rows(self) -> None:
        # given one more, later, slower and without anything cached
        later = row(1, sent_s=11.0, due_s=10.8, delta_s=[12.0, 12.1], end_s=12.2, completion_tokens=2, cached_tokens=0)

        # when
        figures = summarise([row(0), later], 5)

        # then
        assert (figures.completed, figures.failed, figures.not_sent, figures.failures) == (2, 0, 3, {})
        assert figures.duration_s == pytest.approx(2.2)
        assert (figures.ttft.n, figures.ttft.mean, figures.ttft.p50, figures.ttft.max) == pytest.approx(
            (2, 0.75, 0.5, 1)
        )
        assert (figures.itl.n, figures.itl.mean, figures.itl.p99) == pytest.approx((3, 0.7 / 3, 0.4))
        assert (figures.tpot.p50, figures.tpot.max) == pytest.approx((0.1, 0.1))
        assert (figures.e2e.p50, figures.e2e.max) == pytest.approx((1.2, 1.2))
        assert figures.late.max == pytest.approx(0.2)
        assert figures.requests_per_s == pytest.approx(2 / 2.2)
        assert figures.prompt_tokens_per_s == pytest.approx(200 / 2.2)
        assert figures.output_tokens_per_s == pytest.approx(9 / 2.2)
        assert (figures.cached_tokens, figures.hit_rate) == (50, 0.25)
        assert (figures.ideal_hit_rate, figures.of_ideal) == (0.8, pytest.approx(0.3125))

    def test_failed_requests_are_counted_by_kind_and_are_in_no_figure(self) -> None:
        # given
        rows = [row(0), row(1, **FAILED), row(2, **FAILED), row(3, **{**FAILED, "failure": "timeout"})]

        # when
        figures = summarise(rows, 4)

        # then
        assert (figures.completed, figures.failed) == (1, 3)
        assert figures.failures == {"refused 503": 2, "timeout": 1}
        assert (figures.ttft.n, figures.prompt_tokens, figures.hit_rate) == (1, 100, 0.5)
        assert figures.duration_s == pytest.approx(1.2)

    def test_nothing_completed_has_no_figures_and_no_division_by_zero(self) -> None:
        for rows in ([], [row(0, **FAILED)]):
            figures = summarise(rows, 1)
            assert (figures.ttft, figures.hit_rate, figures.of_ideal, figures.requests_per_s) == (None, None, None, 0)

    def test_a_server_that_does_not_count_cached_tokens_has_no_hit_rate(self) -> None:
        figures = summarise([row(0), row(1, cached_tokens=None)], 2)
        assert (figures.cached_tokens, figures.hit_rate, figures.of_ideal) == (None, None, None)
        assert figures.ideal_hit_rate == 0.8

    def test_an_ideal_of_nothing_has_no_ratio(self) -> None:
        assert summarise([row(0, cached_tokens=0, ideal_cached_tokens=0)], 1).of_ideal is None

    def test_percentiles_are_samples_and_those_of_few_are_the_largest(self) -> None:
        twenty, hundred = spread([float(n) for n in range(1, 21)]), spread([float(n) for n in range(1, 101)])
        assert (twenty.n, twenty.p50, twenty.p95, twenty.p99, twenty.max) == (20, 10, 19, 20, 20)
        assert (hundred.p50, hundred.p95, hundred.p99, hundred.max) == (50, 95, 99, 100)


class TestTable:
    def test_a_run_is_shown_with_its_times_rates_and_failures(self) -> None:
        # when
        shown = printed(
            print_run, result([row(0), row(1), row(2, **FAILED)], planned=5, notes=["3 turns are left out"])
        )

        # then
        for text in (
            "radix_cache (m), page 16",
            "workload agent, concurrency 4, max_tokens 16",
            "TTFT, to the first text",
            "500.0*",
            "2 / 1 / 2",
            "1 refused 503",
            "50.00 %",
            "80.00 %",
            "62.50 %",
            "note: 3 turns are left out",
            "note: * too few samples, so this is the largest one (p95 needs 20 and p99 needs 100)",
        ):
            assert text in shown

    def test_enough_samples_carry_no_mark(self) -> None:
        assert "*" not in printed(print_run, result([row(n) for n in range(100)]))

    def test_what_is_not_known_is_said(self) -> None:
        # when
        rows = [row(0, cached_tokens=None, ideal_cached_tokens=None)]
        shown = printed(print_run, result(rows, server={"cache_type": None, "page_size": None}, ending="interrupted"))

        # then
        for text in ("unknown cache", "page unknown", "not reported", "not known", "note: interrupted"):
            assert text in shown


class TestCompare:
    def test_ratios_are_second_over_first(self) -> None:
        # given a second run whose first text comes after a second, with nothing cached
        first = result([row(0)])
        second = result(
            [row(0, delta_s=[11.0, 11.1], cached_tokens=0)], server={"cache_type": "chunk_cache", "page_size": 1}
        )

        # when
        check_comparable(first, second, "A", "B")
        rows = {one.name: one for one in compare(first, second)}
        shown = printed(print_comparison, first, second, list(rows.values()))

        # then
        ttft = rows["TTFT p50"]
        assert (ttft.first, ttft.second, ttft.ratio) == pytest.approx((500.0, 1000.0, 2.0))
        assert (rows["token hit rate"].first, rows["token hit rate"].ratio) == (50.0, 0.0)
        assert rows["requests failed"].ratio is None
        for text in ("radix_cache", "chunk_cache", "2.000", "500", "1,000"):
            assert text in shown

    @pytest.mark.parametrize(
        ("changed", "reason"),
        [
            (
                {"settings": {"workload": "mtbench", "concurrency": 4, "max_tokens": 16}},
                "workload is 'agent'.*'mtbench'",
            ),
            ({"settings": {"workload": "agent", "concurrency": 8, "max_tokens": 16}}, "concurrency is 4.* 8 in the"),
            ({"settings": {"workload": "agent", "concurrency": 4, "max_tokens": 16, "rate": "2"}}, "rate is None.*'2'"),
            ({"digest": "other"}, "the settings are the same, but the requests are not"),
            ({"server": {"model": "other"}}, "model is 'm' in the first and 'other' in the second"),
            ({"ending": "interrupted"}, "B was not completed"),
        ],
    )
    def test_runs_that_differ_in_what_was_sent_are_refused_naming_it(self, changed, reason) -> None:
        with pytest.raises(IncomparableError, match=f"A and B cannot be compared: .*{reason}"):
            check_comparable(result([row(0)]), result([row(0)], **changed), "A", "B")

    def test_a_figure_that_one_run_lacks_is_left_empty(self) -> None:
        first, second = result([row(0)]), result([row(0, **FAILED)])
        rows = {one.name: one for one in compare(first, second)}
        assert (rows["E2E p95"].second, rows["E2E p95"].ratio) == (None, None)
        shown = printed(print_comparison, first, second, list(rows.values()))
        assert "note: the figures are over 1 and 0 requests" in shown


class TestFile:
    def test_a_result_is_read_as_it_was_written(self, tmp_path) -> None:
        # given
        written = result([row(0), row(1, **FAILED)], notes=["a note"])

        # when
        write_result(tmp_path / "a.json", written)

        # then
        assert read_result(tmp_path / "a.json", "first") == written

    def test_another_version_is_refused(self, tmp_path) -> None:
        write_result(tmp_path / "a.json", result([], version=99))
        with pytest.raises(ConfigError, match=r"first=.*version 1, but this is 99"):
            read_result(tmp_path / "a.json", "first")

    def test_a_file_of_bytes_is_refused(self, tmp_path) -> None:
        (tmp_path / "a.json").write_bytes(b'"\xff"')
        with pytest.raises(ConfigError, match="a result file"):
            read_result(tmp_path / "a.json", "first")


def size_of_png(path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])


class TestPicture:
    SEVERAL_TURNS = [
        row(n, turn=n % 3, sent_s=10.0 + n, delta_s=[11.0 + n, 11.5 + n], end_s=12.0 + n) for n in range(9)
    ]

    @pytest.mark.parametrize(
        "runs",
        [
            [result(SEVERAL_TURNS)],
            [result([row(0), row(1, **FAILED)])],
            [result([row(0, ideal_cached_tokens=None, cached_tokens=None)])],
            [result([])],
            [result(SEVERAL_TURNS), result(SEVERAL_TURNS, server={"cache_type": "chunk_cache"})],
            [result([row(0)]), result([row(0, **FAILED)])],
        ],
        ids=["turns", "one turn", "unknown hits", "empty", "two", "two of one name, one failed"],
    )
    def test_a_picture_is_a_png_of_the_promised_size(self, tmp_path, runs) -> None:
        draw_picture(tmp_path / "a.png", runs)
        assert size_of_png(tmp_path / "a.png") == (WIDTH, HEIGHT) == (1600, 1000)

    def test_what_is_drawn_depends_on_the_rows(self, tmp_path) -> None:
        draw_picture(tmp_path / "a.png", [result([row(0)])])
        draw_picture(tmp_path / "b.png", [result([row(0, delta_s=[10.9], cached_tokens=0)])])
        assert (tmp_path / "a.png").read_bytes() != (tmp_path / "b.png").read_bytes()


def test_rows_are_plain_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(row(0)))["delta_s"] == [10.5, 10.7, 11.1]
