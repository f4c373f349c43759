// A prompt of whoever looks, sent as any client's: to the API, with a key that is typed here where one
// is asked for, and without the session of this page, which is good for looking only.

let sending = null; // what stops the answer that comes

const modelOf = (name) => snapshot.models.find((one) => one.name === name);
const pathOf = (model) => (model.has_chat ? "/v1/chat/completions" : "/v1/completions");

function openPrompt() {
  if (!snapshot) return;
  const model = chosenName($("prompt-model"), snapshot.models.map((one) => one.name));
  setText($("prompt-path"), pathOf(modelOf(model)));
  $("prompt").showModal();
  (hasKey() ? $("prompt-text") : $("prompt-key")).select();
}

const hasKey = () => !$("prompt-key") || Boolean($("prompt-key").value.trim());

function requestOf(model) {
  const text = $("prompt-text").value;
  const prompt = model.has_chat ? { messages: [{ role: "user", content: text }] } : { prompt: text };
  const max_tokens = Number($("prompt-tokens").value);
  const body = { model: model.name, ...prompt, max_tokens, stream: true, stream_options: { include_usage: true } };
  const headers = { "Content-Type": "application/json" };
  if ($("prompt-key")) headers.Authorization = `Bearer ${$("prompt-key").value.trim()}`;
  return { method: "POST", credentials: "omit", headers, body: JSON.stringify(body) };
}

async function* eventsOf(stream) { // the data of server-sent events, as the API writes them
  let rest = "";
  for await (const piece of stream.pipeThrough(new TextDecoderStream())) {
    const lines = (rest + piece).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
  }
}

function tell(text, level = "") {
  setText($("prompt-note"), text);
  setData($("prompt-note"), "level", level);
}

async function readAnswer(answer, began) {
  let first = 0, usage = null, reason = "";
  for await (const event of eventsOf(answer.body)) {
    if (event.error) throw new Error(event.error.message);
    const [choice] = event.choices ?? [];
    const text = choice?.text ?? (choice?.delta?.reasoning_content ?? "") + (choice?.delta?.content ?? "");
    if (text) {
      first ||= performance.now();
      $("prompt-answer").append(text);
    }
    reason = choice?.finish_reason ?? reason;
    usage = event.usage ?? usage;
  }
  const took = first ? `first token after ${seconds((first - began) / 1e3)}, ` : "";
  const counts = usage ? `${usage.prompt_tokens} tokens in, ${usage.completion_tokens} out; ` : "";
  tell(`${counts}${took}in all ${seconds((performance.now() - began) / 1e3)}; ended by ${reason}`);
}

async function send() {
  if (sending) { sending.abort(); return; }
  const model = modelOf($("prompt-model").value);
  if (!hasKey()) { tell("An API key with the right inference is needed", "bad"); $("prompt-key").focus(); return; }
  sending = new AbortController();
  $("prompt-answer").replaceChildren();
  $("prompt-answer").hidden = false;
  setText($("prompt-send"), "Stop");
  tell("waiting for the first token");
  const began = performance.now();
  try {
    const answer = await fetch(pathOf(model), { ...requestOf(model), signal: sending.signal });
    if (answer.ok) await readAnswer(answer, began);
    else tell((await answer.json()).error.message, "bad");
  } catch (error) {
    if (sending.signal.aborted) tell("stopped"); else tell(error.message, "bad");
  }
  sending = null;
  setText($("prompt-send"), "Send");
}

$("prompt-send").addEventListener("click", send);
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey) && !sending) send();
});
$("prompt").addEventListener("close", () => sending?.abort());
$("prompt-model").addEventListener("change", ({ target }) => setText($("prompt-path"), pathOf(modelOf(target.value))));
setText($("base-url"), `${location.origin}/v1`);
