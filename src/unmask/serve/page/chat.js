/* The tab that talks with a model. */

import { $, copyToClipboard } from "./common.js";
import { callApi, events, model, tooLong, UserError } from "./api.js";
import { editMessage, focusComposer, isSendKey, showDraft, showMessages, transcript } from "./chat_log.js";
import { Constraint } from "./constraint.js";
import { readNumber, showError } from "./form.js";
import { Options, setDefault } from "./options.js";
import { keep, keepField, saveState } from "./state.js";

/* Messages are {role, content}; answers also have the `seed`, a `note`, and whether they are cut off. */
let conversation = [], cleared = [], activeRequest = null, retries = 0, options, constraint;

const acts = { edit, again: answerAgain, goOn: () => answer({ goesOn: true }) };

function show() {
  const isBusy = activeRequest !== null;
  showMessages(conversation, isBusy ? null : acts);
  $("chat-empty").hidden = conversation.length > 0;
  $("chat-clear").hidden = isBusy || !(conversation.length || cleared.length);
  $("chat-clear").textContent = conversation.length ? "Clear" : "Bring it back";
  $("chat-copy").hidden = isBusy || !conversation.length;
  $("chat-send").hidden = isBusy;
  $("chat-stop").hidden = !isBusy;
}

/* Change something while the end of the conversation stays in view, if it was there. */
function following(change) {
  const page = document.documentElement, atEnd = page.scrollHeight - scrollY - innerHeight < 80;
  change();
  if (atEnd) scrollTo({ top: page.scrollHeight });
}

function request(goesOn) {
  const system = $("chat-system").value.trim(), seed = readNumber($("chat-seed"));
  const messages = conversation.map(({ role, content }) => ({ role, content }));
  return {
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    max_tokens: readNumber($("chat-max-tokens")), ...options.read(), ...constraint.read(),
    ...(seed === undefined ? {} : { seed: seed + retries }), ...(goesOn ? { continue_final_message: true } : {}),
    stream: true, stream_drafts: true,
  };
}

/* Have the conversation answered or, if it `goesOn`, its last answer continued. */
async function answer({ goesOn = false } = {}) {
  showError("chat");
  let body;
  try {
    body = request(goesOn);
  } catch (error) {
    show();
    showError("chat", error);
    return;
  }
  const controller = activeRequest = new AbortController(), isFromLog = $("chat-log").contains(document.activeElement);
  const before = goesOn ? conversation.pop().content : "", written = { role: "assistant", content: before };
  let showStep = null;
  $("chat-status").textContent = "waiting in the queue…";
  following(() => { show(); showStep = showDraft(); if (before) showStep(before); });
  if (isFromLog) $("chat-stop").focus(); // the button that was used is gone
  try {
    let isComplete = false;
    for await (const { data } of events(await callApi("/v1/chat/completions", body, controller.signal))) {
      if (data === null) isComplete = true;
      else take(data, written, (draft) => following(() => showStep(before + draft)));
    }
    if (!isComplete) throw new UserError("The server stopped before the answer was finished: try again.");
  } catch (error) {
    written.note = "stopped";
    written.isCutOff = true;
    if (error.name !== "AbortError") tell(error);
  }
  if (activeRequest === controller) finish(written);
}

/* One chunk of the stream: what was added for good, or a draft of all. */
function take({ choices, draft, seed }, written, showStep) {
  written.seed = seed;
  for (const { delta, finish_reason: reason } of choices) {
    written.content += delta.content ?? "";
    written.isCutOff = reason === "length";
    written.note = written.isCutOff ? "cut off: more tokens are in the settings" : undefined;
  }
  if (!draft) return;
  showStep(draft.text);
  $("chat-status").textContent = "writing…";
}

const tell = (error) => showError("chat", error.isTooLong ? new UserError(tooLong("Ask for fewer tokens, or clear the conversation."), { param: "max_tokens" }) : error);

function finish(written) {
  const isStopped = written.note === "stopped", losesFocus = document.activeElement === $("chat-stop");
  activeRequest = null;
  if (written.content) conversation.push(written);
  const nothing = isStopped ? "stopped before anything was written" : "the answer is empty";
  $("chat-status").textContent = written.content ? (isStopped ? "stopped" : "") : $("chat-error").hidden ? nothing : "";
  $("chat-said").textContent = written.content ? `The model: ${written.content}` : "";
  following(show);
  if (losesFocus) focusComposer();
  saveState();
}

function send(event) {
  event.preventDefault();
  const content = $("chat-text").value;
  if (activeRequest || model.chat === false) return;
  if (!content.trim()) {
    showError("chat", new UserError("There is no message yet: type one.", { field: $("chat-text") }));
    return;
  }
  $("chat-text").value = "";
  focusComposer();
  say(content);
}

function say(content) {
  conversation.push({ role: "user", content });
  cleared = [];
  retries = 0;
  answer();
}

/* Another answer to the last message, with the next seed. */
function answerAgain() {
  if (conversation.at(-1).role === "assistant") {
    conversation.pop();
    retries += 1;
  }
  answer();
}

function edit(index) {
  const resend = (text) => { conversation.length = index; focusComposer(); say(text); };
  editMessage(index, conversation[index].content, resend, () => { show(); focusComposer(); });
}

/* Forget the conversation; once more, and it is there again. */
function clear() {
  [conversation, cleared] = conversation.length ? [[], conversation] : [cleared, []];
  retries = 0;
  showError("chat");
  $("chat-status").textContent = conversation.length ? "" : "cleared";
  $("chat-said").textContent = "";
  show();
  saveState();
  focusComposer();
}

function onKey(event) {
  const lastUser = conversation.findLastIndex(({ role }) => role === "user");
  if (isSendKey(event)) {
    event.preventDefault();
    event.stopPropagation();
    $("chat-form").requestSubmit();
  } else if (event.key === "ArrowUp" && !$("chat-text").value && lastUser >= 0 && !activeRequest) {
    event.preventDefault();
    edit(lastUser);
  }
}

/* A conversation of a link, which may be damaged: anything but messages is left out. */
function restoreConversation(text) {
  try {
    const isMessage = ({ role, content }) => ["user", "assistant"].includes(role) && typeof content === "string";
    conversation = JSON.parse(text).filter(isMessage);
  } catch {
    conversation = [];
  }
  show();
}

/* What the chosen model allows; without a chat template, it says so instead. */
function showModel() {
  $("chat-missing").hidden = model.chat;
  $("chat-form").hidden = !model.chat;
  $("chat-missing").textContent = `${model.id} has no chat template, so it cannot chat: it fills holes and continues texts. A file chat_template.jinja in the model's folder would be one.`;
  options.showModel();
  $("chat-max-tokens").max = Math.min(model.max_length, model.limits.max_tokens);
  setDefault($("chat-max-tokens"), String(Math.max(1, Math.min(128, model.limits.max_tokens, Math.floor(model.max_length / 2)))));
  countSettings();
}

function countSettings() {
  const isSet = [$("chat-system").value !== "", constraint.kind !== "any"].filter(Boolean).length + options.countFurther();
  $("chat-more-count").textContent = isSet ? ` (${isSet} set)` : "";
}

/* Set the tab up; returns what follows the chosen model, and the API's description. */
export function setUpChat() {
  keepField("chat-system", true);
  keepField("chat-text", true);
  keepField("chat-max-tokens");
  options = new Options("chat-", { only: (param) => param !== "n", values: { steps: 64 } });
  constraint = new Constraint("chat-", "The answer");
  constraint.showHoles(["the answer"]);
  keep("conversation", { read: () => JSON.stringify(conversation), write: restoreConversation, initial: () => "[]", long: true });
  $("chat-form").addEventListener("submit", send);
  for (const kind of ["input", "change"]) $("chat-form").addEventListener(kind, countSettings);
  $("chat-text").addEventListener("keydown", onKey);
  $("chat").addEventListener("keydown", (event) => { if (event.key === "Escape") activeRequest?.abort(); });
  $("chat-stop").addEventListener("click", () => activeRequest?.abort());
  $("chat-clear").addEventListener("click", clear);
  $("chat-copy").addEventListener("click", () => copyToClipboard($("chat-copy"), transcript(conversation)));
  show();
  const describe = ({ ChatRequest }) => { options.describe(ChatRequest); constraint.describe(); };
  return { showModel, describe };
}
