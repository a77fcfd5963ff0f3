// OpenAI's Node package: chat completions and responses.
import OpenAI from 'openai';
import { ANSWER, CHOICE_SCHEMA, CITY_SCHEMA, LONG_TEXT, MIN_LONG_TOKENS, PIXEL, QUESTION, RESULT, SEEN, TIMEOUT_MS, expect, main } from './tasks.mjs';

const USER = [{ role: 'user', content: QUESTION }];
const TOOL = { type: 'function', function: { name: 'temperature_of', parameters: CITY_SCHEMA } };
const clientOf = ({ openaiUrl, key }) => new OpenAI({ baseURL: openaiUrl, apiKey: key, timeout: TIMEOUT_MS, maxRetries: 0 });

async function chat(server) {
  const client = clientOf(server);
  const models = [];
  for await (const model of client.models.list()) models.push(model.id);
  expect(models.includes(server.model), models);
  const answer = await client.chat.completions.create({ model: server.model, messages: USER, max_completion_tokens: 20 });
  expect(answer.choices[0].message.content && answer.usage.prompt_tokens > 0, answer);
  const response = await client.responses.create({ model: server.model, input: QUESTION, max_output_tokens: 20 });
  expect(response.output_text, response);
}

async function stream(server) {
  const client = clientOf(server);
  const running = client.chat.completions.stream({
    model: server.model, messages: USER, max_tokens: 20, stream_options: { include_usage: true },
  });
  const final = await running.finalChatCompletion();
  expect(final.choices[0].message.content && final.usage.completion_tokens > 0, final);
  const kinds = [];
  const events = await client.responses.create({ model: server.model, input: QUESTION, max_output_tokens: 20, stream: true });
  for await (const event of events) kinds.push(event.type);
  expect(kinds[0] === 'response.created' && /^response\.(completed|incomplete)$/.test(kinds.at(-1)), kinds);
}

async function tools(server) {
  const called = [];
  const temperature_of = ({ city }) => (called.push(city), RESULT);
  const running = clientOf(server).chat.completions.runTools({
    model: server.model, messages: USER,
    tools: [{ type: 'function', function: { ...TOOL.function, function: temperature_of, parse: JSON.parse } }],
  });
  const answer = await running.finalContent();
  expect(answer === ANSWER && called[0] === 'Basel', [answer, called]);
}

async function structuredOutput(server) {
  const format = { type: 'json_schema', json_schema: { name: 'city', strict: true, schema: CHOICE_SCHEMA } };
  const answer = await clientOf(server).chat.completions.parse({
    model: server.model, messages: USER, response_format: format, max_tokens: 200,
  });
  expect('city' in JSON.parse(answer.choices[0].message.content), answer);
}

async function thoughts(server) {
  const answer = await clientOf(server).chat.completions.create({ model: server.model, messages: USER, reasoning_effort: 'low' });
  expect(answer.choices[0].message.reasoning_content, answer);
}

async function images(server) {
  const url = `data:image/png;base64,${PIXEL}`;
  const content = [{ type: 'text', text: 'What is it?' }, { type: 'image_url', image_url: { url } }];
  const client = clientOf(server);
  const answer = await client.chat.completions.create({ model: server.model, messages: [{ role: 'user', content }] });
  expect(answer.choices[0].message.content.includes(SEEN), answer);
  const items = [{ type: 'input_text', text: 'What is it?' }, { type: 'input_image', image_url: url }];
  const response = await client.responses.create({ model: server.model, input: [{ role: 'user', content: items }] });
  expect(response.output_text.includes(SEEN), response);
}

async function longPrompt(server) {
  const messages = [{ role: 'user', content: LONG_TEXT }];
  const answer = await clientOf(server).chat.completions.create({ model: server.model, messages, max_tokens: 8 });
  expect(answer.usage.prompt_tokens > MIN_LONG_TOKENS, answer.usage);
}

async function cancel(server) {
  const running = await clientOf(server).chat.completions.create({
    model: server.model, messages: USER, max_tokens: 1000, stream: true,
  });
  for await (const _ of running) break;
  running.controller.abort();
  await chat(server);
}

await main({ chat, stream, tools, 'structured output': structuredOutput, thoughts, images, 'long prompt': longPrompt, cancel });
