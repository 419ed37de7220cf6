// The conversation: what is sent, what streams back, and how text becomes elements. Text of a model is never HTML:
// it only ever goes into text nodes.

/** Yield the data of each server-sent event of a response. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    rest += value;
    const whole = rest.split(/\r?\n\r?\n/);
    rest = whole.pop();
    for (const event of whole) {
      const data = event
        .split(/\r?\n/)
        .filter((line) => line.startsWith("data:"))
        .map((line) => line.slice(5).trimStart())
        .join("\n");
      if (data) yield data;
    }
  }
}

/** Return the message of an error response, whatever its form. */
export async function problemOf(response) {
  const text = await response.text();
  try {
    const { error } = JSON.parse(text);
    return error?.message ?? text;
  } catch {
    return text || `the server answered ${response.status}`;
  }
}

/** Put a text into an element: fenced blocks and `code` set apart, all else as it is. */
export function write(element, text) {
  const parts = text.split(/^```[^\n]*\n?/m); // an odd part is inside a fence, also while the fence is still open
  const made = parts.flatMap((part, index) => (index % 2 ? [block(part)] : inline(outside(part, index, parts.length))));
  element.replaceChildren(...made);
}

/** Drop the line ends that a text has towards a block before or after it: the block brings its own space. */
function outside(text, index, count) {
  const begun = index > 0 ? text.replace(/^\n+/, "") : text;
  return index < count - 1 ? begun.replace(/\n+$/, "") : begun;
}

function block(text) {
  const pre = document.createElement("pre");
  pre.tabIndex = 0; // it may scroll
  const code = document.createElement("code");
  code.textContent = text.replace(/\n$/, "");
  pre.append(code);
  return pre;
}

function inline(text) {
  const made = text.split(/`([^`\n]+)`/).map((part, index) => {
    if (index % 2 === 0) return document.createTextNode(part);
    const code = document.createElement("code");
    code.textContent = part;
    return code;
  });
  return made.filter((node) => node.textContent);
}

export class Chat {
  /**
   * @param {{log: HTMLElement, empty: HTMLElement, request: (body: object, signal: AbortSignal) => Promise<Response>,
   *   settings: () => object}} parts
   */
  constructor({ log, empty, request, settings }) {
    this.log = log;
    this.empty = empty;
    this.request = request;
    this.settings = settings;
    this.messages = [];
    this.running = null;
  }

  get busy() {
    return this.running !== null;
  }

  reset() {
    this.stop();
    this.messages = [];
    this.log.replaceChildren(this.empty);
  }

  stop() {
    this.running?.abort();
  }

  /** Send a message and show the answer as it comes. */
  async send(text) {
    const { system, ...sampling } = this.settings();
    const messages = this.messages;
    this.empty.remove();
    write(this.turn("user"), text);
    messages.push({ role: "user", content: text });
    const answer = this.turn("assistant");
    const turn = answer.parentElement;
    turn.classList.add("waiting");
    this.log.setAttribute("aria-busy", "true");
    const stopping = new AbortController();
    this.running = stopping;
    const clock = { sent: performance.now(), first: null, tokens: 0, usage: null, reason: null };
    let said = "";
    let drawn = false;
    const draw = () => {
      drawn = false;
      this.follow(() => write(answer, said));
    };
    try {
      const head = system ? [{ role: "system", content: system }] : [];
      const body = { messages: [...head, ...messages], stream: true, stream_options: { include_usage: true }, ...sampling };
      const response = await this.request(body, stopping.signal);
      if (!response.ok) throw new Error(await problemOf(response));
      for await (const data of events(response)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        if (chunk.usage) clock.usage = chunk.usage;
        const choice = chunk.choices?.[0];
        const piece = choice?.delta?.content ?? "";
        if (choice?.finish_reason) clock.reason = choice.finish_reason;
        if (!piece) continue;
        clock.first ??= performance.now();
        clock.last = performance.now();
        said += piece;
        if (!drawn) {
          drawn = true;
          requestAnimationFrame(draw);
        }
      }
    } catch (error) {
      if (!stopping.signal.aborted) this.problem(turn, error.message);
    } finally {
      this.running = null;
      turn.classList.remove("waiting");
      draw();
      this.cost(turn, clock, stopping.signal.aborted);
      this.log.removeAttribute("aria-busy");
      if (said) messages.push({ role: "assistant", content: said });
      else messages.pop();
    }
  }

  turn(who) {
    const turn = document.createElement("div");
    turn.className = `turn ${who}`;
    const name = document.createElement("span");
    name.className = "hidden";
    name.textContent = who === "user" ? "You:" : "Model:";
    const words = document.createElement("div");
    words.className = "words";
    turn.append(name, words);
    this.log.append(turn);
    this.log.scrollTop = this.log.scrollHeight;
    return words;
  }

  problem(turn, text) {
    const line = document.createElement("p");
    line.className = "problem";
    line.setAttribute("role", "alert");
    line.textContent = text;
    this.follow(() => turn.append(line));
  }

  /** Say below an answer what it took. */
  cost(turn, clock, stopped) {
    if (clock.first === null) return;
    const words = [`first token after ${((clock.first - clock.sent) / 1000).toFixed(2)} s`];
    const tokens = clock.usage?.completion_tokens;
    if (tokens) {
      const seconds = (clock.last - clock.first) / 1000;
      words.push(`${tokens} tokens`);
      if (tokens > 1 && seconds > 0) words.push(`${((tokens - 1) / seconds).toFixed(1)} tokens/s`);
    }
    if (stopped) words.push("stopped");
    else if (clock.reason === "length") words.push("cut at the longest answer");
    const line = document.createElement("p");
    line.className = "cost";
    line.textContent = words.join(", ");
    this.follow(() => turn.append(line));
  }

  /** Change the log, and keep its end in sight if it was. */
  follow(change) {
    const atEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 60;
    change();
    if (atEnd) this.log.scrollTop = this.log.scrollHeight;
  }
}
