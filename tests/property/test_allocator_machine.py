"""PagedTokenToKVPoolAllocator and its port against three sets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from app.errors import DoubleFreeError, ForeignPageError, OutOfPagesError
from app.memory.paged_allocator import PagedTokenToKVPoolAllocator
from tests.support.tree_model import identity

CAPACITY = 12


class AllocatorMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.allocator = PagedTokenToKVPoolAllocator(CAPACITY, 4, identity())
        self.free: set[int] = set(range(1, CAPACITY + 1))
        self.recorded: list[int] = []
        self.held: list[int] = []

    @rule(num_pages=st.integers(0, CAPACITY + 1))
    def allocate(self, num_pages: int) -> None:
        if num_pages > len(self.free):
            with pytest.raises(OutOfPagesError) as refusal:
                self.allocator.allocate(num_pages)
            assert (refusal.value.need, refusal.value.free) == (num_pages, len(self.free))
            return
        pages = self.allocator.allocate(num_pages).tolist()
        assert len(set(pages)) == num_pages
        assert set(pages) <= self.free
        self.free -= set(pages)
        self.held += pages

    @rule(data=st.data())
    def free_some(self, data: st.DataObject) -> None:
        pages = self._some_of(data, self.held)
        self.allocator.port.free(np.array(pages, np.int32))
        self.held = [page for page in self.held if page not in pages]
        self.recorded += pages

    @rule(data=st.data())
    def give_back_some(self, data: st.DataObject) -> None:
        pages = self._some_of(data, self.held)
        self.allocator.give_back(np.array(pages, np.int32))
        self.held = [page for page in self.held if page not in pages]
        self.free |= set(pages)

    @rule()
    def apply_the_snapshot(self) -> None:
        self.allocator.apply_frees(self.allocator.port.recorded_frees())
        self.free |= set(self.recorded)
        self.recorded = []

    @rule(data=st.data())
    def apply_some(self, data: st.DataObject) -> None:
        pages = self._some_of(data, self.recorded)
        self.allocator.apply_frees(np.array(pages, np.int32))
        self.recorded = [page for page in self.recorded if page not in pages]
        self.free |= set(pages)

    @rule(pages=st.lists(st.integers(-2, CAPACITY + 2), min_size=1, max_size=6))
    def wrong_frees_are_refused(self, pages: list[int]) -> None:
        named = np.array(pages, np.int32)
        foreign = any(not 1 <= page <= CAPACITY for page in pages)
        for owners, give in (
            (self.held, self.allocator.port.free),
            (self.held, self.allocator.give_back),
            (self.recorded, self.allocator.apply_frees),
        ):
            if foreign or len(set(pages)) < len(pages) or not set(pages) <= set(owners):
                with pytest.raises(ForeignPageError if foreign else DoubleFreeError):
                    give(named)

    @rule()
    def lose_pool(self) -> None:
        self.allocator.reset(identity(self.allocator.identity.generation + 1))
        self.free, self.recorded, self.held = set(range(1, CAPACITY + 1)), [], []

    @invariant()
    def both_faces_equal_the_sets(self) -> None:
        port = self.allocator.port
        self.allocator.check_integrity()
        assert set(self.allocator.free_page_ids().tolist()) == set(port.free_page_ids().tolist()) == self.free
        assert self.allocator.held_page_ids().tolist() == sorted(self.held)
        assert port.recorded_frees().tolist() == self.recorded
        assert self.allocator.num_free == len(self.free)
        assert port.available() == len(self.free) + len(self.recorded)

    @staticmethod
    def _some_of(data: st.DataObject, pages: list[int]) -> list[int]:
        return data.draw(st.lists(st.sampled_from(pages), unique=True)) if pages else []


AllocatorMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
test_allocator_equals_three_sets = AllocatorMachine.TestCase
