"""What clients send, as pydantic models: types are strict, unknown fields are ignored, null means not given."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

from deepinfer_core.sampling import MAX_LOGPROBS, MAX_N

Number = StrictFloat | StrictInt
Token = Annotated[StrictInt, Field(ge=0, le=2**31 - 1)]
Count = Annotated[StrictInt, Field(ge=0)]
StopText = Annotated[StrictStr, Field(min_length=1, max_length=1024)]
Stop = StopText | Annotated[list[StopText], Field(max_length=4096)]


class Wire(BaseModel):
    """Base of everything that is read."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class StreamOptions(Wire):
    """What a stream carries beside its text."""

    include_usage: StrictBool | None = None
    continuous_usage_stats: StrictBool | None = None


class Sampling(Wire):
    """What both generating routes take. Ranges that are not here are those of `SamplingParams`.

    The fields from ``top_k`` on are not OpenAI's; its clients send them as ``extra_body``.
    """

    model: StrictStr
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    n: Annotated[StrictInt, Field(ge=1, le=MAX_N)] | None = None
    stop: Stop | None = None
    seed: StrictInt | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    logit_bias: Annotated[dict[StrictStr, Number], Field(max_length=4096)] | None = None
    user: StrictStr | None = None
    top_k: StrictInt | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    min_tokens: Count | None = None
    ignore_eos: StrictBool | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=4096)] | None = None
    priority: StrictInt | None = None
    deadline_ms: Number | None = None


class JsonSchema(Wire):
    """``response_format.json_schema``."""

    name: StrictStr | None = None
    description: StrictStr | None = None
    strict: StrictBool | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class ResponseFormat(Wire):
    """The form that the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class CompletionRequest(Sampling):
    """``POST /v1/completions``."""

    prompt: StrictStr | list[StrictStr] | list[Token] | list[list[Token]]
    suffix: StrictStr | None = None
    echo: StrictBool | None = None
    logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Annotated[StrictInt, Field(ge=1, le=MAX_N)] | None = None
    response_format: ResponseFormat | None = None


class Part(Wire):
    """A part of a message."""

    type: StrictStr
    text: StrictStr | None = None
    refusal: StrictStr | None = None


class CalledFunction(Wire):
    """A function that an assistant called, with its arguments as JSON text."""

    name: StrictStr
    arguments: StrictStr | dict[str, Any] | None = None


class ToolCall(Wire):
    """A call in an assistant's message."""

    id: StrictStr | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Wire):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: StrictStr | list[Part] | None = None
    name: StrictStr | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=256)] | None = None
    tool_call_id: StrictStr | None = None
    reasoning_content: StrictStr | None = None


class Function(Wire):
    """A function that the model may call."""

    name: Annotated[StrictStr, Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")]
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(Wire):
    """A tool: always a function."""

    type: Literal["function"]
    function: Function


class ChosenFunction(Wire):
    """The function that must be called."""

    name: StrictStr


class ToolChoice(Wire):
    """Names the tool that must be called."""

    type: Literal["function"]
    function: ChosenFunction


class ChatRequest(Sampling):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[StrictInt, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: StrictBool | None = None
    chat_template: Any = None
    chat_template_kwargs: Annotated[dict[StrictStr, Any], Field(max_length=32)] | None = None


class TokenizeRequest(Wire):
    """``POST /tokenize``: a prompt, or messages that go through the chat template."""

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: StrictBool = True


class DetokenizeRequest(Wire):
    """``POST /detokenize``."""

    model: StrictStr | None = None
    tokens: Annotated[list[Token], Field(max_length=1 << 20)]
