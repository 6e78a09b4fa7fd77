/* The server: its answers, and what goes wrong, in a visitor's words. */

import { capital } from "./common.js";

const GONE = "The server does not answer. Is it still running?";
const BROKEN_OFF = "The connection to the server broke off. Is it still running?";

/* A sentence that can be shown as it is. */
export class Fault extends Error {}

/* What /v1/models says of the model, once it is known. */
export const model = { max_length: Infinity, limits: {} };

export const tooLong = () => {
  const most = Math.min(model.limits.max_tokens ?? Infinity, model.max_length);
  const written = most < model.max_length ? `, at most ${most} of them hidden` : "";
  return `This is too long: the model takes ${model.max_length} tokens at once${written}. Shorten the text or its holes.`;
};

const SENTENCES = {
  401: () => "This server wants its token: load the page again, and give the token as the password.",
  413: () => "This text is too long for the server: try a shorter one.",
  429: () => "The server is busy: try again in a few seconds.",
  500: () => "Something went wrong in the server: its log says what.",
  504: () => "This took too long: ask for fewer tokens, steps or candidates.",
  timeout: () => "This took too long: ask for fewer tokens, steps or candidates.",
  context_length_exceeded: tooLong,
  max_tokens: tooLong,
  prompt_tokens: tooLong,
};

export function sentence(status, { message = "", type, param, code } = {}) {
  const own = [status, type, code, param].map((key) => SENTENCES[key]).find(Boolean);
  if (own) return own();
  const [, characters] = message.match(/unknown to the tokenizer \((.+?)\) and cannot be written/) || [];
  if (characters) return `This model does not know some characters (${characters}): leave them out. The examples show what the model reads.`;
  return message ? `${capital(message).replace(/[.]$/, "")}.` : `The server answered with the status ${status}.`;
}

/* The sentence for a request that failed, except where somebody stopped it. */
const failing = (text) => (error) => { throw error.name === "AbortError" ? error : new Fault(text); };

export async function ask(path, body, signal) {
  const options = body === undefined ? {} : {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal,
  };
  const answer = await fetch(path, options).catch(failing(GONE));
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => ({}));
  throw new Fault(sentence(answer.status, told.error));
}

/* Server-sent events of a POST, which EventSource cannot do. */
export async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(failing(BROKEN_OFF));
    if (done) return;
    rest += value;
    for (let end = rest.indexOf("\n\n"); end >= 0; end = rest.indexOf("\n\n")) {
      const event = {};
      for (const line of rest.slice(0, end).split("\n")) {
        const colon = line.indexOf(": ");
        event[line.slice(0, colon)] = line.slice(colon + 2);
      }
      rest = rest.slice(end + 2);
      const data = JSON.parse(event.data);
      if (event.event === "error") throw new Fault(sentence(0, data.error));
      yield { name: event.event, data };
    }
  }
}

/* The number in a field, or undefined if it is empty and may be. */
export function number(field) {
  const { disabled, validity, value, labels } = field;
  if (disabled || (value === "" && !validity.badInput && !field.required)) return undefined;
  const whole = !field.hasAttribute("step");
  const wrong = validity.badInput || validity.valueMissing || validity.rangeUnderflow || validity.rangeOverflow;
  if (wrong || (whole && !Number.isInteger(Number(value)))) {
    field.setAttribute("aria-invalid", "true");
    field.addEventListener("input", () => field.removeAttribute("aria-invalid"), { once: true });
    field.focus();
    const name = labels[0].textContent.trim(), kind = whole ? "a whole number" : "a number";
    throw new Fault(`${name} must be ${kind} from ${field.min} to ${field.max}.`);
  }
  return Number(value);
}
