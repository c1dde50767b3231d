"""Copies from the device to the host: which prefixes, when, and what became of them.

    offered (published, matched often) --.
                                          >-- draft --> sent --> landed: the host tree's
    leaving (eviction is about to take) -'      `-- refused: as before      `-- failed, late: freed

An offer is a key: what it means in pages is found out when a plan is made, so that nothing stays pinned for it. What
leaves is read at once, for its pages are freed by the very plan that copies them, and lost if that has no room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain, takewhile

import numpy as np

from app.caches.base import InsertResult, LockReceipt, MatchResult
from app.caches.component_cache import ComponentCache
from app.caches.tiers.backup_pace import BackupPace
from app.caches.tiers.branches import Branches
from app.caches.tiers.coming import BackupUnderWay, Leaving, lack
from app.caches.tiers.counters import TierTally
from app.caches.tiers.host_cache import HostCache
from app.caches.tiers.host_tree import HostPlace
from app.caches.tiers.listening import num_duplicates
from app.caches.tiers.needs import Lack, Needs
from app.caches.tiers.offers import Offer, Offers
from app.caches.tiers.span import Span
from app.caches.tree.node import EVICTED, TreeNode
from app.caches.tree.reading import key_of_node, upwards_from
from app.config.tier_settings import TierSettings
from app.core.keys import RadixKey
from app.core.transfers import Backup, PageCounts, PageIds, TierLimits, TransferEnd

MAX_OFFERS_A_PLAN = 64
_MAX_LET_GO = 64  # keys, that nobody looked at before
_ENDS_TRIED = 32  # of those that a prefix can be cut to, so that it fits


class Backups:
    """Single-threaded. Device pages are never held for a backup; host pages are from prepare to its end."""

    def __init__(
        self,
        *,
        device: ComponentCache,
        host: HostCache,
        needs: Needs,
        settings: TierSettings,
        limits: TierLimits,
        numbers: Iterator[int],
        tally: TierTally,
    ) -> None:
        self.pace = BackupPace(limits.staging_bytes, limits.num_bytes(PageCounts(1, 1)))
        self.bytes_in_flight = 0
        self._device = device
        self._host = host
        self._needs = needs
        self._limits = limits
        self._numbers = numbers
        self._tally = tally
        self._policy = settings.write_policy
        self._min_hits = settings.write_min_hits if settings.write_policy == "write_through_selective" else 0
        self._is_plain = needs.is_plain
        self._offers = Offers(covers_shorter=needs.is_plain)
        self._allowed = 0  # bytes of offers, for the plan that is being made
        self._last_offer: RadixKey | None = None
        self._leaving: list[Leaving] = []
        self._leaving_pages = 0
        self._let_go: list[tuple[RadixKey, HostPlace]] = []  # keys of which the device keeps less than it had
        self._covered: set[TreeNode] = set()  # their pages are in what is leaving, on the host, or given up
        self._branches = Branches(needs.page_size)
        self._drafted: list[tuple[BackupUnderWay, Leaving | None]] = []
        self._sent: dict[int, BackupUnderWay] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._offers) + len(self._leaving)

    @property
    def is_urgent(self) -> bool:
        """Whether something is better begun now than with the next plan that has rows."""
        return bool(self._offers or self._leaving)

    @property
    def num_sent(self) -> int:
        return len(self._sent)

    # -- what the cache tells

    def published(self, key: RadixKey, result: InsertResult, pages: np.ndarray) -> None:
        num_pages = result.num_tokens // self._needs.page_size
        if self._policy != "write_through" or num_pages <= result.first:
            return
        if not self._is_plain or num_duplicates(result) < num_pages:
            self._offer(key, result.node, np.concatenate([pages[: result.first], result.pages]))

    def matched(self, key: RadixKey, found: MatchResult) -> None:
        if self._min_hits and found.num_tokens and found.node.uses >= self._min_hits and key is not self._last_offer:
            self._last_offer = key  # a request that waits is matched again and again with the same key
            self._offer(key, found.node, found.pages)

    def leaving(self, node: TreeNode) -> None:
        """O(tokens of its path), once for each leaf that goes; O(1) for what goes with it."""
        self._branches.left(node)
        if node.uses < self._min_hits or (self._is_plain and node in self._covered):
            return
        if self._limits.num_bytes(PageCounts(self._leaving_pages)) > self._limits.staging_bytes:
            self._tally.backup_drops["staging_full"] += 1
            return
        key = key_of_node(node)
        place = self._host.place(key)
        self._let_go.append((key, place))
        num_pages = key.num_tokens // self._needs.page_size
        lacking = lack(
            self._host,
            self._needs,
            chain(self._under_way(), self._leaving),
            key,
            place,
            num_pages,
            partial(self._device.span_to, node),
        )
        if self._is_plain and not self._is_worth(node, lacking):
            self._tally.backup_drops["not_worth"] += 1
            return
        part = None if lacking is None else self._longest(lacking, num_pages, self._limits.staging_bytes)
        if part is None:
            self._host.refresh(key, place)
            return
        self._leaving_pages += part.num_pages
        self._leaving.append(Leaving(self._head(key, part.end), part))

    def note_step(self, *, prompt_tokens: int, decode_rows: int, seconds: float) -> None:
        """As CacheTiers says."""
        is_copying = bool(self._sent)
        self.pace.note_step(
            prompt_tokens=prompt_tokens, decode_rows=decode_rows, seconds=seconds, is_copying=is_copying
        )

    # -- plans

    def next_plan(self, *, is_restoring: bool) -> bool:
        """The next plan is made. While restores are under way, only what would be lost otherwise.

        -> whether it is worth a draft.
        """
        self._covered.clear()
        self._leaving_pages = 0
        self._allowed = self.pace.take() if self._offers and not is_restoring else 0
        return bool(self._allowed or self._leaving or self._drafted or len(self._let_go) > _MAX_LET_GO)

    def draft(self, *, restoring_bytes: int) -> tuple[Backup, ...]:
        """What the next plan begins."""
        self.refused()  # of a plan that was never sent
        if not (self._allowed or self._leaving or self._let_go):
            return ()
        room = self._limits.staging_bytes - self.bytes_in_flight - restoring_bytes
        for key, place in self._let_go:
            place = place if self._host.is_there(place) else self._host.place(key)
            self._host.spare(place, self._device.num_present(key) if self._is_plain else 0)
        self._let_go.clear()
        leaving, self._leaving = self._leaving, []
        # All of their parents first: making room for one must not evict those of another.
        locked = [(each, place := self._place_before(each.key, each.span), self._host.hold(place)) for each in leaving]
        for each, place, receipt in locked:
            span = self._cut(each.span, room)
            room -= self._bytes(self._begin(Offer(each.key), span, receipt, place.num_pages, each))
        self._draft_offers(room)
        return tuple(Backup(number=begun.number, source=begun.span.ids()) for begun, _ in self._drafted)

    def prepared(self, given: tuple[PageIds | None, ...]) -> None:
        for (begun, _), ids in zip(self._drafted, given, strict=True):
            if ids is None:
                self._host.unlock(begun.receipt)
                self._tally.backup_drops["refused"] += 1
                continue
            begun.host_ids = ids
            self._sent[begun.number] = begun
            self.bytes_in_flight += self._bytes(begun.span)
        self._drafted.clear()

    def refused(self) -> None:
        """The plan was not prepared, so what it was to free is there yet: all goes with the next."""
        if not self._drafted:
            return
        self._offers.start_anew()
        self._offers.put_first(*(Offer(begun.key) for begun, left in self._drafted if left is None))
        self._leaving = [left for _, left in self._drafted if left is not None] + self._leaving
        self._forget_draft()

    def ended(self, end: TransferEnd) -> tuple[RadixKey, Span] | None:
        """One of `sends` ended. -> what the host tree adopted, and of which key; None if nothing."""
        begun = self._sent.pop(end.number)
        self.bytes_in_flight -= self._bytes(begun.span)
        landed = None
        if end.failure is None:
            adopted = self._land(begun, begun.span.filled(begun.ids()))
            if adopted.num_pages:
                landed = begun.key, adopted
            else:
                self._tally.backup_drops["unusable"] += 1
            self._tally.backed_up_tokens += int(np.count_nonzero(adopted.pages)) * self._needs.page_size
            self._tally.backed_up_bytes += end.num_bytes
            self._tally.backup_s += end.seconds
        else:
            self._host.free(begun.ids())
            self._tally.backup_drops[end.failure] += 1
            self._offers.forget_from(begun.key)  # or they were tried again, and fail, plan by plan
        self._host.unlock(begun.receipt)
        return landed

    def sends(self, number: int) -> bool:
        """Whether that is a backup under way."""
        return number in self._sent

    def forget_waiting(self) -> None:
        """Nothing that waits is wanted any more, or means anything."""
        self._offers.clear()
        self._leaving.clear()
        self._let_go.clear()
        self._branches.forget()
        self._covered.clear()
        self._leaving_pages = 0
        self._last_offer = None
        self._forget_draft()
        for begun in self._sent.values():
            begun.node = None

    def lose_host(self) -> None:
        """The host pools are gone, and with them what was under way to them, and every receipt."""
        self._drafted.clear()
        self._sent.clear()
        self.bytes_in_flight = 0
        self.forget_waiting()

    def in_flight_ids(self) -> list[PageIds]:
        """Host pages that are being written."""
        return [begun.ids() for begun in self._sent.values()]

    # -- within

    def _offer(self, key: RadixKey, node: TreeNode, pages: np.ndarray) -> None:
        if not self._offers.add(self._head(key, pages.size), node, pages):
            self._tally.backup_drops["queue_full"] += 1

    def _land(self, begun: BackupUnderWay, arrived: Span) -> Span:
        """The pages become the host tree's. -> those of them that it lacked."""
        key = begun.key
        if self._is_plain and begun.num_held >= arrived.first:
            adopted, place = self._host.insert_after(key, arrived)
        else:
            adopted = self._host.insert(key, arrived)
            place = self._host.place(key)
        is_on_device = begun.node is not None and begun.node.epoch != EVICTED
        there = arrived.end if is_on_device else self._device.num_present(key)
        if self._is_plain or (there == arrived.end and not begun.is_leaving):
            self._host.spare(place, there)
        return adopted

    def _is_worth(self, node: TreeNode, lacking: Lack | None) -> bool:
        """And nothing above has to be asked for again, while the same plan is made."""
        gone: Iterable[TreeNode] = upwards_from(node)
        is_worth = True
        if lacking is not None:
            branch = self._branches.branch(node)
            is_worth = self._branches.has_to_go(branch, lacking.present)
            gone = gone if is_worth else branch
        self._covered.update(takewhile(lambda each: each not in self._covered, gone))
        return is_worth

    def _under_way(self) -> Iterator[BackupUnderWay]:
        yield from self._sent.values()
        for begun, _ in self._drafted:
            yield begun

    def _draft_offers(self, room: int) -> None:
        """Those that wait longest, as many as the pace allows; one of them whatever its length."""
        allowed = self._allowed
        least = self._limits.page_bytes.pages if self._is_plain else room
        for _ in range(min(len(self._offers), MAX_OFFERS_A_PLAN)):
            if allowed <= 0:
                return
            offer = self._offers.take()
            key = offer.key
            num_pages = key.num_tokens // self._needs.page_size
            place = self._host.place(key)
            lacking = lack(self._host, self._needs, self._under_way(), key, place, num_pages, self._reader(offer))
            if lacking is None:
                continue
            if lacking.present < offer.num_begun:
                self._tally.backup_drops["gone"] += 1  # and it would be again: the host cannot keep so much
                continue
            span = self._longest(lacking, num_pages, min(room, max(allowed, least)))
            if span is None:
                if self._longest(lacking, num_pages, self._limits.staging_bytes) is not None:
                    self._offers.put_first(offer)  # it would fit if less were under way
                    return
                continue
            if not self._is_plain:
                place = self._place_before(key, span)
            span = self._begin(offer, span, self._host.hold(place), place.num_pages, None)
            if not span.num_pages:
                continue
            if span.end < num_pages and self._is_plain:
                offer.num_begun = span.end
                self._offers.put_last(offer)  # the rest, another time
            num_bytes = self._bytes(span)
            room, allowed, least = room - num_bytes, allowed - num_bytes, 0

    def _reader(self, offer: Offer) -> Callable[[int], Span]:
        """What the device has of it, from a page index on."""
        if offer.node is None or offer.node.epoch == EVICTED:
            return partial(self._device.span, offer.key)
        return offer.span if self._is_plain else partial(self._device.span_to, offer.node)

    def _longest(self, lacking: Lack, num_pages: int, room: int) -> Span | None:
        """What makes the longest prefix usable on the host that takes no more than `room` bytes.

        None if there is no such, or nothing is lacking.
        """
        if self._is_plain:
            span = self._cut(lacking.here, room)
            return span if span.num_pages else None
        ends = lacking.ends(self._needs, num_pages)
        for end in ends[: -1 - _ENDS_TRIED : -1].tolist():
            span = lacking.part(self._needs, end)
            if span.num_pages and self._bytes(span) <= room:
                return span
        return None

    def _cut(self, span: Span, room: int) -> Span:
        """To so many bytes: nothing of it, if it is not usable in part."""
        if self._is_plain:
            return span.head(max(room, 0) // self._limits.page_bytes.pages)
        return span if self._bytes(span) <= room else span.head(0)

    def _place_before(self, key: RadixKey, span: Span) -> HostPlace:
        """Where what the host has of the pages before `span` ends."""
        return self._host.place(key.head(span.first * self._needs.page_size))

    def _begin(self, offer: Offer, span: Span, receipt: LockReceipt, num_held: int, left: Leaving | None) -> Span:
        """Draft a backup of as much of `span` as the host can make room for. -> that.

        receipt: of the first `num_held` pages, on the host; given back if there is none.
        """
        if not span.num_pages:
            return self._not_begun("staging_full", span, receipt)
        if not self._host.make_room(self._counts(span)):
            span = span.head(self._host.reachable().pages if self._is_plain else 0)
            if not span.num_pages or not self._host.make_room(self._counts(span)):
                return self._not_begun("no_room", span, receipt)
        key = self._head(offer.key, span.end)
        node = offer.node if key is offer.key else None
        begun = BackupUnderWay(next(self._numbers), key, span, receipt, num_held, node, left is not None)
        self._drafted.append((begun, left))
        return span

    def _not_begun(self, reason: str, span: Span, receipt: LockReceipt) -> Span:
        self._tally.backup_drops[reason] += 1
        self._host.unlock(receipt)
        return span.head(0)

    def _head(self, key: RadixKey, num_pages: int) -> RadixKey:
        num_tokens = num_pages * self._needs.page_size
        return key if key.num_tokens == num_tokens else key.head(num_tokens)

    def _forget_draft(self) -> None:
        for begun, _ in self._drafted:
            self._host.unlock(begun.receipt)
        self._drafted.clear()

    def _counts(self, span: Span) -> PageCounts:
        return PageCounts(span.num_pages) if self._is_plain else span.counts()

    def _bytes(self, span: Span) -> int:
        if self._is_plain:
            return span.num_pages * self._limits.page_bytes.pages
        return self._limits.num_bytes(span.counts())
