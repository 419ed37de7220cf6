"""``deepinfer chat``: a conversation in the terminal, or over a pipe a line a message."""

from __future__ import annotations

import sys
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer
from attrs import define, evolve, field

from deepinfer_core.cli import options
from deepinfer_core.cli.generate import Number, Whole, timing
from deepinfer_core.cli.interrupts import StopKey
from deepinfer_core.errors import CapacityError, DeepinferError, RequestError

if TYPE_CHECKING:
    from deepinfer_core.engine.metrics import RequestMetrics
    from deepinfer_core.llm import LLM
    from deepinfer_core.sampling import SamplingParams

HELP = """\
/reset          forget the conversation, keep the system message
/system TEXT    set the system message and forget the conversation; without TEXT, show it
/stats          times of the last answer, and how full the context is
/exit           leave (also Ctrl-D)
a \\ at the end of a line continues the message on the next line
Ctrl-C          stop the answer; once more, or when none is being written, leave"""

ROOM = 0.25
"""Share of the context that old messages leave to the answer, if it may be that long."""


def command(
    model: Annotated[str | None, typer.Argument(help="Checkpoint directory or GGUF file.", show_default=False)] = None,
    system: Annotated[str | None, typer.Option(help="System message.", show_default=False)] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of one answer.", min=1)] = 1024,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest token.")] = 0.7,
    top_k: Whole = None,
    top_p: Number = None,
    min_p: Number = None,
    seed: Whole = None,
    config: options.ConfigFile = None,
    sets: options.SetKeys = None,
    max_model_len: options.MaxModelLen = None,
    kv_memory: options.KvMemory = None,
    policy: options.Policy = None,
    dtype: options.Dtype = None,
    device: options.Device = None,
    backend: options.Backend = None,
) -> None:
    """Talk to a model; what is said stays in the context for as long as it fits.

    Example: deepinfer chat models/m --system "Answer in one sentence."

    Over a pipe every line is a message and only the answers are printed: echo "Hello" | deepinfer chat models/m
    """
    from deepinfer_core.config import load_config
    from deepinfer_core.sampling import SamplingParams

    chosen: dict[str, Any] = {"top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    params = SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        **{name: value for name, value in chosen.items() if value is not None},
    )
    overrides = options.overrides(
        sets=sets,
        max_model_len=max_model_len,
        kv_memory=kv_memory,
        policy=policy,
        dtype=dtype,
        device=device,
        backend=backend,
    )
    resolved = load_config(config, overrides)
    if model is not None:
        resolved = evolve(resolved, config=evolve(resolved.config, model=model))
    from deepinfer_core.llm import LLM

    llm = LLM(config=resolved)
    if not llm.tokenizer.has_chat_template:
        raise RequestError("this model has no chat template, so it cannot chat; use deepinfer generate --prompt")
    talk(Conversation(llm, params, system=system), terminal=sys.stdin.isatty())


@define(eq=False)
class Conversation:
    """What has been said, and the model that answers.

    Attributes:
        llm: The model.
        params: How answers are sampled.
        system: The system message; None for none.
        messages: User and assistant in turn, the system message not among them.
        context: Tokens of the last prompt and answer.
        last: Times of the last answer, and why it ended.
    """

    llm: LLM
    params: SamplingParams
    system: str | None = None
    messages: list[dict[str, str]] = field(factory=list)
    context: int = 0
    last: tuple[RequestMetrics, str] | None = None

    @property
    def limit(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.llm.running.engine.limits.max_model_len

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages.clear()
        self.context = 0

    def ask(self, text: str, say: Any) -> int:
        """Answer a message, piece by piece through ``say``; what was said so far stays said when that is interrupted.

        Returns:
            How many old messages had to be forgotten first.

        Raises:
            CapacityError: The message alone is longer than the context. It is not kept.
            RequestError: The chat template refuses it. It is not kept.
            KeyboardInterrupt: The user stopped the answer. What was written of it is kept.
        """
        self.messages.append({"role": "user", "content": text})
        try:
            ids, forgotten = self._fit()
        except DeepinferError:
            self.messages.pop()
            raise
        params = evolve(self.params, max_tokens=min(self.params.max_tokens or self.limit, self.limit - len(ids)))
        said: list[str] = []
        self.context = len(ids)
        try:
            with StopKey() as stop, closing(self.llm.stream(ids, params)) as pieces:
                for piece in pieces:
                    said.append(piece.text)
                    self.last = piece.metrics, piece.finish_reason or "stopped"
                    self.context = len(ids) + len(piece.metrics.token_times)
                    say(piece.text)
                    stop.check()
        finally:
            self.messages.append({"role": "assistant", "content": "".join(said)})
        return forgotten

    def _fit(self) -> tuple[list[int], int]:
        """Return the prompt, and how many messages from the oldest on were dropped to leave an answer its room."""
        room = min(self.params.max_tokens or self.limit, max(1, int(self.limit * ROOM)))
        before = len(self.messages)
        while True:
            head = [{"role": "system", "content": self.system}] if self.system is not None else []
            ids = self.llm.tokenizer.encode_chat([*head, *self.messages])
            if len(ids) + room <= self.limit:
                return ids, before - len(self.messages)
            if len(self.messages) == 1:
                if len(ids) < self.limit:
                    return ids, before - 1
                raise CapacityError(
                    f"the message makes a prompt of {len(ids)} tokens, and the context holds {self.limit} with the "
                    "answer; shorten it, or raise --max-model-len"
                )
            del self.messages[:2]


def talk(conversation: Conversation, *, terminal: bool) -> None:
    """Read messages and answer them until the input ends."""
    if terminal:
        with suppress(ImportError):
            import readline  # noqa: F401 - line editing and history for input()
        _note(f"{conversation.llm.running.config.model}: {conversation.limit} tokens of context; /help for commands")
    while (text := _read(terminal)) is not None:
        command, _, rest = text.strip().partition(" ")
        if not command:
            continue
        if command in ("/exit", "/quit"):
            return
        if command.startswith("/"):
            _obey(conversation, command, rest.strip())
            continue
        try:
            forgotten = conversation.ask(text, lambda piece: print(piece, end="", flush=True))
        except KeyboardInterrupt:
            print(flush=True)
            if not terminal:
                raise
            _note("stopped; Ctrl-C once more leaves")
            continue
        except DeepinferError as error:
            if not terminal:
                raise
            _note(str(error))
            continue
        print(flush=True)
        if forgotten:
            _note(f"the context is full: the oldest {forgotten} messages were forgotten")


def _read(terminal: bool) -> str | None:
    """Return the next message, None at the end of the input."""
    lines: list[str] = []
    while True:
        try:
            line = input(("... " if lines else "> ") if terminal else "")
        except EOFError:
            if terminal:
                print()
            return "\n".join(lines) if lines else None
        except UnicodeDecodeError as error:
            raise RequestError(f"the input is not text: {error}") from None
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])


def _obey(conversation: Conversation, command: str, rest: str) -> None:
    if command == "/help":
        _note(HELP)
    elif command == "/reset":
        conversation.reset()
        _note("forgotten")
    elif command == "/system":
        if rest:
            conversation.system = rest
            conversation.reset()
        _note(f"system: {conversation.system}" if conversation.system is not None else "there is no system message")
    elif command == "/stats":
        if conversation.last is not None:
            _note(timing(*conversation.last))
        share = conversation.context / conversation.limit
        said = len(conversation.messages)
        _note(f"{said} messages, {conversation.context} of {conversation.limit} tokens of context ({share:.0%})")
    else:
        _note(f"there is no {command}; /help, /reset, /system, /stats, /exit")


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
