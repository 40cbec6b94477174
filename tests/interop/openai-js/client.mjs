// Calls the door through OpenAI's client for JavaScript: whole, streamed, parsed, with tools, refused, cut off and aborted.
//
//     node client.mjs BASE_URL API_KEY RESULTS
//
// Runs where package.json's packages are installed.

import { writeFile } from "node:fs/promises";

import OpenAI from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";

const [baseURL, apiKey, results] = process.argv.slice(2);
const announced = new Set();
const noting = async (address, init) => {
  for (const [name] of new Headers(init.headers)) announced.add(name);
  return fetch(address, init);
};
// As in a page: the headers that are noted are those of the browser.
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0, dangerouslyAllowBrowser: true, fetch: noting });
const model = "demo";
const messages = [{ role: "user", content: "What is 2 + 3?" }];
const common = { model, messages, temperature: 0 };
const Sum = z.object({ a: z.number().int(), b: z.number().int(), note: z.string().nullable() });
const parameters = z.object({ a: z.number().int(), b: z.number().int() });

async function errorOf(call) {
  try {
    await call();
  } catch (error) {
    return [error.constructor.name, error.status ?? null, error.code ?? null];
  }
  return null;
}

async function chats() {
  const whole = await client.chat.completions.create({ ...common, logprobs: true, top_logprobs: 2 });
  let text = "";
  for await (const chunk of await client.chat.completions.create({
    ...common, stream: true, stream_options: { include_usage: true },
  })) text += chunk.choices[0]?.delta.content ?? "";
  const helper = client.chat.completions.stream({ ...common, stream_options: { include_usage: true } });
  const final = await helper.finalChatCompletion();
  const format = zodResponseFormat(Sum, "sum");
  const parsed = await client.chat.completions.parse({ ...common, response_format: format, max_tokens: 64 });
  const streamed = await client.chat.completions
    .stream({ ...common, response_format: format, max_tokens: 64 }).finalChatCompletion();
  return { whole, text, final, parsed: parsed.choices[0].message.parsed,
    streamed: streamed.choices[0].message.parsed,
    cut: await errorOf(() => client.chat.completions.parse({ ...common, response_format: format, max_tokens: 3 })) };
}

async function tools() {
  const given = [];
  const add = { type: "function", function: { name: "add", description: "Adds.", parse: JSON.parse,
    parameters: z.toJSONSchema(parameters), function: (call) => { given.push(call); return `${call.a + call.b}`; } } };
  const ended = [];
  for (const stream of [false, true]) {
    const runner = client.chat.completions.runTools({ ...common, stream, tools: [add],
      tool_choice: { type: "function", function: { name: "add" } } });
    await runner.done();
    ended.push(runner.messages.map((one) => one.role));
  }
  const parsed = await client.chat.completions.parse({ ...common, tool_choice: "required",
    tools: [zodFunction({ name: "add", parameters })] });
  const [call] = parsed.choices[0].message.tool_calls;
  const after = await client.chat.completions.create({ ...common, tools: [add], messages: [...messages,
    parsed.choices[0].message, { role: "tool", tool_call_id: call.id, content: "5" }] });
  return { given, ended, parsed: call.function.parsed_arguments, reason: parsed.choices[0].finish_reason,
    after: after.choices[0].message.content };
}

async function responses() {
  const asked = { model, input: "What is 2 + 3?", temperature: 0 };
  const whole = await client.responses.create(asked);
  const events = [];
  const stream = client.responses.stream(asked);
  for await (const event of stream) events.push(event.type);
  const streamed = await stream.finalResponse();
  const format = { format: zodTextFormat(Sum, "sum") };
  const parsed = await client.responses.parse({ ...asked, text: format, max_output_tokens: 64 });
  const called = await client.responses.create({ ...asked, tool_choice: "required", tools: [{
    type: "function", name: "add", strict: true, parameters: z.toJSONSchema(parameters) }] });
  const [call] = called.output;
  const next = await client.responses.create({ ...asked, previous_response_id: called.id,
    input: [{ type: "function_call_output", call_id: call.call_id, output: "5" }] });
  const cut = await client.responses.create({ ...asked, max_output_tokens: 3 });
  const short = await client.responses.parse({ ...asked, text: format, max_output_tokens: 3 });
  const again = await client.responses.retrieve(whole.id);
  await client.responses.delete(whole.id);
  return { text: whole.output_text, usage: whole.usage, events, streamed: streamed.output_text,
    parsed: parsed.output_parsed, call, next: next.output_text, cut: [cut.status, cut.incomplete_details],
    cutParsed: [short.status, short.output_parsed],
    again: again.output_text, gone: await errorOf(() => client.responses.retrieve(whole.id)) };
}

async function errors() {
  const create = (fields, one = client) => errorOf(() => one.chat.completions.create({ ...common, ...fields }));
  return { temperature: await create({ temperature: 99 }), model: await create({ model: "other" }),
    key: await create({}, client.withOptions({ apiKey: "another-key-of-nobody" })),
    length: await create({ messages: [{ role: "user", content: "2 ".repeat(1100) }] }),
    response: await errorOf(() => client.responses.create({ model, input: "2", previous_response_id: "resp-none" })) };
}

async function abort() {
  const stream = await client.chat.completions.create({ ...common, stream: true, max_tokens: 600, ignore_eos: true });
  for await (const _ of stream) break;
  const controller = new AbortController();
  const waiting = client.chat.completions.create({ ...common, max_tokens: 600, ignore_eos: true },
    { signal: controller.signal });
  setTimeout(() => controller.abort(), 20);
  return errorOf(() => waiting);
}

// The list of models comes when the engine is idle, which it is not before what was aborted has ended.
const told = { chats: await chats(), tools: await tools(), responses: await responses(), errors: await errors(),
  abort: await abort(), models: (await client.models.list()).data.map((one) => one.id), announced: [...announced] };
await writeFile(results, JSON.stringify(told));
