"""The engine as the commands use it: opened from settings, asked for answers, checked, closed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from app.commands.nodes.joining import joined
from app.commands.progress import progress_bar
from app.config.cache_type import CacheTypeChoice
from app.config.server_args import ServerArgs
from app.core.sampling import SamplingParams

if TYPE_CHECKING:
    from app.containers import Container
    from app.scheduling.request import RequestOutput


class Prompt(NamedTuple):
    """A user's text, as one turn of a chat or as it is."""

    text: str
    system: str | None = None
    raw: bool = False


class Engine(Protocol):
    """What answers prompts. Tests put a small fake in its place."""

    @property
    def cache(self) -> CacheTypeChoice: ...

    @property
    def has_tiers(self) -> bool:
        """Whether the cache has tiers below the device pool."""
        ...

    def answer(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[RequestOutput]:
        """Answer them together; outputs in the order of the prompts. May be called again."""
        ...

    def check_ledger(self) -> dict[str, int]:
        """Raise IntegrityError unless every page has one owner; -> pages by class."""
        ...


OpenEngine = Callable[[ServerArgs], contextlib.AbstractContextManager[Engine]]


class ContainerEngine:
    """The engine that a container assembles."""

    def __init__(self, container: Container) -> None:
        self.cache: CacheTypeChoice = container.cache_type()
        self.has_tiers: bool = container.scheduler_adapter().has_tiers
        self._scheduler = container.scheduler()
        self._tokenizer = container.tokenizer()
        self._num_asked = 0

    def answer(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> list[RequestOutput]:
        from app.scheduling.engine import generate_all
        from app.scheduling.request import Request

        requests = []
        for prompt in prompts:
            token_ids = self._tokenizer.encode(self._as_text(prompt))
            requests.append(Request(request_id=f"cli-{self._num_asked}", prompt_token_ids=token_ids, sampling=sampling))
            self._num_asked += 1
        with progress_bar() as report:
            report("computing; new shapes are compiled first", 0.0)
            return generate_all(self._scheduler, requests)

    def check_ledger(self) -> dict[str, int]:
        self._scheduler.check_integrity()
        return self._scheduler.ledger()

    def _as_text(self, prompt: Prompt) -> str:
        if prompt.raw:
            return prompt.text
        messages = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
        messages.append({"role": "user", "content": prompt.text})
        return self._tokenizer.apply_chat_template(messages)


@contextlib.contextmanager
def open_container(server_args: ServerArgs, prepare: Callable[[Container], object]) -> Iterator[Container]:
    """A container on which `prepare` has run; progress is shown up to there. Closed on every way out.

    With several nodes it is entered and left by all of them together.
    """
    from app.containers import build_container
    from app.providers.compilation import keep_compiled_programs

    keep_compiled_programs()
    with joined(server_args), contextlib.ExitStack() as closing:
        with progress_bar() as report:
            container = build_container(server_args, progress=report)
            closing.callback(container.shutdown_resources)
            prepare(container)
        yield container


@contextlib.contextmanager
def open_engine(server_args: ServerArgs) -> Iterator[Engine]:
    """An engine that is ready to answer: model loaded. Programs that --warmup did not compile are when first needed."""
    with open_container(server_args, _make_ready) as container:
        yield ContainerEngine(container)


def _make_ready(container: Container) -> None:
    """Load the model; say what may surprise; compile what was asked for."""
    from app.providers.warmup import level_of_batch, warm_up

    container.scheduler()
    announce_settings(container)
    tell, level = container.progress(), level_of_batch(container.server_args().warmup)
    for step in warm_up(container.runtime(), level, container.scheduler_limits(), container.tree_cache().tiers):
        if tell is not None:
            tell(*step)


def announce_settings(container: Container) -> None:
    """Log what may surprise in the settings."""
    import structlog

    from app.providers.report import notes

    for note in notes(container):
        structlog.get_logger(__name__).warning("setting_noted", note=note)
