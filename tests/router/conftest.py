"""A real router on real sockets, with fake workers; a small tokenizer trained on the spot."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest
import tokenizers

from router.pool.rank_watch import RankWatch
from router.service import RouterService
from router.text.tokenizer import Tokenizer
from runtime.config import ClusterConfig, ClusterSection, ModelSection, RouterSection, TierSection
from tests.router.fakes import SECRET, FakeDecode, FakePrefill
from tests.router.outputs import MAX_MODEL_LEN
from tests.tcp_proxy import Proxy
from tests.waiting import until

if TYPE_CHECKING:
    import openai

MODEL = "org/tiny-model"
ANSWER = "Hello w\u00f6rld \U0001f642 and more text follows. END of it."
SPECIAL = ["<bos>", "<eos>", "<user>", "<assistant>"]
CORPUS = [ANSWER, "def fibonacci(n): return n", "the quick brown fox jumps over the lazy dog"]
TEMPLATE = (
    "{{ bos_token }}"
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}<user>{{ m.content }}"
    "{% elif m.role == 'assistant' %}<assistant>{{ m.content }}<eos>"
    "{% else %}{{ raise_exception('no role ' + m.role) }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def train_tokenizer(
    special: Sequence[str] = SPECIAL, more: Sequence[str] = ()
) -> tokenizers.Tokenizer:
    """``more``: texts that are to be few tokens as well."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400 + 400 * bool(more),
        special_tokens=list(special),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*CORPUS, *more], trainer)
    return backend


def write_model(
    folder: Path,
    *,
    template: str = TEMPLATE,
    special: Sequence[str] = SPECIAL,
    more: Sequence[str] = (),
) -> None:
    """A checkpoint's folder without weights."""
    backend = train_tokenizer(special, more)
    backend.save(str(folder / "tokenizer.json"))
    eos = backend.token_to_id("<eos>")
    files: dict[str, object] = {
        "config.json": {
            "vocab_size": backend.get_vocab_size(),
            "max_position_embeddings": MAX_MODEL_LEN,
            "eos_token_id": eos,
        },
        "tokenizer_config.json": {
            "bos_token": "<bos>",
            "eos_token": {"content": "<eos>"},
            "add_bos_token": True,
            "chat_template": template,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Tokenizer:
    return Tokenizer.from_dir(model_dir)


@dataclass
class Cluster:
    """One router and its fake workers."""

    service: RouterService
    tokenizer: Tokenizer
    answer: str = ANSWER
    prefills: list[FakePrefill] = field(default_factory=list)
    decodes: list[FakeDecode] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.service.http_port}"

    @property
    def control(self) -> str:
        return f"127.0.0.1:{self.service.control_port}"

    @property
    def ranks(self) -> RankWatch:
        assert self.service._registry is not None
        return self.service._registry._watch

    @property
    def prefill(self) -> FakePrefill:
        return self.prefills[0]

    @property
    def decode(self) -> FakeDecode:
        return self.decodes[0]

    @property
    def eos(self) -> int:
        (token_id,) = self.service._models[0].limits.eos_token_ids
        return token_id

    def script(self, prompt: Sequence[int]) -> list[int]:
        """The answer and eos, then filler for who ignores eos."""
        ids = self.tokenizer.encode(self.answer, add_special_tokens=False)
        return [*ids, self.eos, *ids, *[ids[0]] * MAX_MODEL_LEN]

    def text_of(self, num_tokens: int) -> str:
        """The answer's first tokens."""
        pieces = self.tokenizer.vocabulary.pieces
        return b"".join(pieces[token_id] for token_id in self.script([])[:num_tokens]).decode()

    @property
    def num_answer_tokens(self) -> int:
        """With eos."""
        return len(self.tokenizer.encode(self.answer, add_special_tokens=False)) + 1

    async def add_prefill(self, name: str = "prefill-0", port: int = 0) -> FakePrefill:
        worker = FakePrefill(name, MODEL, self.script)
        self.prefills.append(worker)
        await worker.start(self.control, port)
        return worker

    async def add_decode(
        self,
        name: str = "decode-0",
        port: int = 0,
        *,
        proxy: Proxy | None = None,
        max_num_requests: int = 0,
    ) -> FakeDecode:
        worker = FakeDecode(
            name, MODEL, self.script, proxy=proxy, max_num_requests=max_num_requests
        )
        self.decodes.append(worker)
        await worker.start(self.control, port)
        return worker

    async def add_pair(self) -> None:
        """One worker of each role, and the stream of tokens between router and decode."""
        await self.add_prefill()
        await self.add_decode()
        await until(lambda: self.decode.num_streams > 0)

    async def close(self) -> None:
        for worker in (*self.prefills, *self.decodes):
            await worker.close()


StartRouter = Callable[..., Awaitable[Cluster]]


@pytest.fixture
async def start_router(model_dir: Path, tokenizer: Tokenizer) -> AsyncIterator[StartRouter]:
    """Start a router without workers; keyword arguments are those of ``RouterSection``.

    ``folder``: of another model than the usual one.
    """
    closers: list[Callable[[], Awaitable[None]]] = []

    async def start(
        folder: Path | None = None, tiers: tuple[TierSection, ...] = (), **section: object
    ) -> Cluster:
        # A test that is about waiting for workers, or about leases, says so.
        waits = {"worker_wait_s": 0.2, "lease_ttl_s": 30.0}
        options = {"port": 0, "control_port": 0, **waits, **section}
        config = ClusterConfig(
            cluster=ClusterSection(secret=SECRET),
            model=ModelSection(path=str(folder or model_dir), name=MODEL),
            router=RouterSection(**options),  # type: ignore[arg-type]
            tiers=tiers,
        )
        service = RouterService(config, Path("unused.toml"))
        await service.startup()
        main = asyncio.create_task(service.main_loop())
        cluster = Cluster(service, tokenizer if folder is None else Tokenizer.from_dir(folder))

        async def close() -> None:
            await cluster.close()
            main.cancel()
            await asyncio.gather(main, return_exceptions=True)
            await service.shutdown()

        closers.append(close)
        return cluster

    yield start
    for close in closers:
        await close()


@pytest.fixture(scope="session")
def folder() -> Path | None:
    """Of another model than the usual one, where a file of tests says so."""
    return None


@pytest.fixture
async def cluster(start_router: StartRouter, folder: Path | None) -> Cluster:
    """A router with one prefill and one decode worker."""
    cluster = await start_router(folder)
    await cluster.add_pair()
    return cluster


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    import openai

    async with openai.AsyncOpenAI(
        base_url=f"{cluster.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(cluster.url) as session:
        yield session
