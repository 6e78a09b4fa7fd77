/* Calls of the server's API; errors become sentences for the user. */

import { capital } from "./common.js";

const NO_ANSWER = "The server does not answer. Is it still running?";
const CONNECTION_LOST = "The connection to the server broke off. Is it still running?";

/* An error whose message is shown to the user; `param` is the field of the request that was refused, if it was one,
   `field` the control that was. */
export class UserError extends Error {
  constructor(message, { param, field, isTooLong = false } = {}) {
    super(message);
    Object.assign(this, { param, field, isTooLong });
  }
}

/* The card of the chosen model, once /v1/models has answered. */
export const model = { max_length: Infinity, limits: {} };

/* Every request names the chosen model. */
export const withModel = (body) => ({ model: model.id, ...body });

export function tooLong(advice = "Shorten the text or its holes.") {
  const maxTokens = Math.min(model.limits.max_tokens ?? Infinity, model.max_length);
  const hiddenNote = maxTokens < model.max_length ? `, at most ${maxTokens} of them hidden` : "";
  return `This is too long: the model takes ${model.max_length} tokens at once${hiddenNote}. ${advice}`;
}

const MESSAGES = {
  401: "This server wants its token: load the page again, and give the token as the password.",
  413: "This text is too long for the server: try a shorter one.",
  429: "The server is busy: try again in a few seconds.",
  500: "Something went wrong in the server: its log says what.",
  504: "This took too long: ask for fewer tokens, steps or candidates.",
  timeout: "This took too long: ask for fewer tokens, steps or candidates.",
};

/* What is too long by the server's words: the model's length, or the server's own limits. */
const TOO_LONG = ["context_length_exceeded", "max_tokens", "prompt_tokens"];

function errorMessage(status, { message = "", type }) {
  const known = MESSAGES[status] ?? MESSAGES[type];
  if (known) return known;
  const [, characters] = message.match(/unknown to the tokenizer \((.+?)\) and cannot be written/) || [];
  if (characters) return `This model does not know some characters (${characters}): leave them out. The examples show what the model reads.`;
  return message ? `${capital(message).replace(/[.]$/, "")}.` : `The server answered with the status ${status}.`;
}

/* The error of a response or of a stream; the status of a stream is that of its beginning, so it is not given. */
function toUserError(error = {}, status = undefined) {
  const isTooLong = TOO_LONG.some((name) => [error.code, error.param].includes(name));
  return new UserError(isTooLong ? tooLong() : errorMessage(status, error), { param: error.param, isTooLong });
}

/* Replace any error by a UserError, except when the user stopped the request. */
const rethrowAs = (text) => (error) => { throw error.name === "AbortError" ? error : new UserError(text); };

export async function callApi(path, body, signal) {
  const options = body === undefined ? {} : {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(withModel(body)), signal,
  };
  const response = await fetch(path, options).catch(rethrowAs(NO_ANSWER));
  if (response.ok) return response;
  const { error } = await response.json().catch(() => ({}));
  throw toUserError(error, response.status);
}

/* Server-sent events of a POST request (EventSource supports GET only): their names and data; OpenAI's have no names,
   and end with [DONE], whose data is null. */
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
      const data = event.data === "[DONE]" ? null : JSON.parse(event.data);
      if (event.event === "error") throw toUserError(data.error);
      yield { name: event.event, data };
    }
  }
}
