/* Calls of the server's API; errors become sentences for the user. */

import { capital } from "./common.js";

const NO_ANSWER = "The server does not answer. Is it still running?";
const CONNECTION_LOST = "The connection to the server broke off. Is it still running?";

/* An error whose message is shown to the user. */
export class UserError extends Error {}

/* The model card of /v1/models, once it is loaded. */
export const model = { max_length: Infinity, limits: {} };

export const tooLong = () => {
  const maxTokens = Math.min(model.limits.max_tokens ?? Infinity, model.max_length);
  const hiddenNote = maxTokens < model.max_length ? `, at most ${maxTokens} of them hidden` : "";
  return `This is too long: the model takes ${model.max_length} tokens at once${hiddenNote}. Shorten the text or its holes.`;
};

const MESSAGES = {
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

export function errorMessage(status, { message = "", type, param, code } = {}) {
  const known = [status, type, code, param].map((key) => MESSAGES[key]).find(Boolean);
  if (known) return known();
  const [, characters] = message.match(/unknown to the tokenizer \((.+?)\) and cannot be written/) || [];
  if (characters) return `This model does not know some characters (${characters}): leave them out. The examples show what the model reads.`;
  return message ? `${capital(message).replace(/[.]$/, "")}.` : `The server answered with the status ${status}.`;
}

/* Replace any error by a UserError, except when the user stopped the request. */
const rethrowAs = (text) => (error) => { throw error.name === "AbortError" ? error : new UserError(text); };

export async function callApi(path, body, signal) {
  const options = body === undefined ? {} : {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ model: model.id, ...body }), signal,
  };
  const response = await fetch(path, options).catch(rethrowAs(NO_ANSWER));
  if (response.ok) return response;
  const { error } = await response.json().catch(() => ({}));
  throw new UserError(errorMessage(response.status, error));
}

/* Server-sent events of a POST request (EventSource supports GET only). */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(rethrowAs(CONNECTION_LOST));
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
      if (event.event === "error") throw new UserError(errorMessage(0, data.error));
      yield { name: event.event, data };
    }
  }
}

/* The number in a field; undefined if the field is optional and empty. */
export function readNumber(field) {
  const { disabled, validity, value, labels } = field;
  if (disabled || (value === "" && !validity.badInput && !field.required)) return undefined;
  const isInteger = !field.hasAttribute("step");
  const invalid = validity.badInput || validity.valueMissing || validity.rangeUnderflow || validity.rangeOverflow;
  if (invalid || (isInteger && !Number.isInteger(Number(value)))) {
    field.setAttribute("aria-invalid", "true");
    field.addEventListener("input", () => field.removeAttribute("aria-invalid"), { once: true });
    field.focus();
    const name = labels[0].textContent.trim(), kind = isInteger ? "a whole number" : "a number";
    throw new UserError(`${name} must be ${kind} from ${field.min} to ${field.max}.`);
  }
  return Number(value);
}
