// Anthropic's Node package: messages.
import Anthropic from '@anthropic-ai/sdk';
import { ANSWER, CHOICE_SCHEMA, CITY_SCHEMA, LONG_TEXT, MIN_LONG_TOKENS, PIXEL, QUESTION, RESULT, SEEN, TIMEOUT_MS, expect, main } from './tasks.mjs';

const USER = [{ role: 'user', content: QUESTION }];
const TOOL = { name: 'temperature_of', description: 'Tells how warm it is.', input_schema: CHOICE_SCHEMA };
const clientOf = ({ url, key }) => new Anthropic({ baseURL: url, apiKey: key, timeout: TIMEOUT_MS, maxRetries: 0 });

async function chat(server) {
  const client = clientOf(server);
  const models = [];
  for await (const model of client.models.list()) models.push(model.id);
  expect(models.includes(server.model), models);
  const { input_tokens } = await client.messages.countTokens({ model: server.model, messages: USER });
  const answer = await client.messages.create({ model: server.model, messages: USER, max_tokens: 20 });
  const { usage } = answer;
  const used = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens;
  expect(used === input_tokens && answer.content[0].type === 'text', answer);
}

async function stream(server) {
  const running = clientOf(server).messages.stream({ model: server.model, messages: USER, max_tokens: 20 });
  const texts = [];
  running.on('text', (text) => texts.push(text));
  const final = await running.finalMessage();
  expect(texts.join('') === final.content[0].text && final.usage.output_tokens > 0, final);
}

async function tools(server) {
  const client = clientOf(server);
  const asked = { model: server.model, max_tokens: 32000, tools: [TOOL] };
  const first = await client.messages.stream({ ...asked, messages: USER }).finalMessage();
  const call = first.content.find((block) => block.type === 'tool_use');
  expect(call?.input.city === 'Basel', first);
  const result = { type: 'tool_result', tool_use_id: call.id, content: RESULT };
  const messages = [...USER, { role: 'assistant', content: first.content }, { role: 'user', content: [result] }];
  const last = await client.messages.stream({ ...asked, messages }).finalMessage();
  expect(last.content.at(-1).text === ANSWER, last);
}

async function structuredOutput(server) {
  const answer = await clientOf(server).messages.create({
    model: server.model, messages: USER, max_tokens: 200,
    output_config: { format: { type: 'json_schema', schema: CHOICE_SCHEMA } },
  });
  expect('city' in JSON.parse(answer.content.at(-1).text), answer);
}

async function thoughts(server) {
  const answer = await clientOf(server).messages.create({
    model: server.model, messages: USER, max_tokens: 2048, thinking: { type: 'adaptive' },
  });
  expect(answer.content[0].type === 'thinking', answer);
}

async function images(server) {
  const source = { type: 'base64', media_type: 'image/png', data: PIXEL };
  const content = [{ type: 'text', text: 'What is it?' }, { type: 'image', source }];
  const answer = await clientOf(server).messages.create({ model: server.model, messages: [{ role: 'user', content }], max_tokens: 400 });
  expect(answer.content.at(-1).text.includes(SEEN), answer);
}

async function longPrompt(server) {
  const messages = [{ role: 'user', content: LONG_TEXT }];
  const answer = await clientOf(server).messages.create({ model: server.model, messages, max_tokens: 8 });
  const { usage } = answer;
  expect(usage.input_tokens + usage.cache_read_input_tokens > MIN_LONG_TOKENS, answer.usage);
}

async function cancel(server) {
  const running = clientOf(server).messages.stream({ model: server.model, messages: USER, max_tokens: 1000 });
  for await (const _ of running) break;
  running.abort();
  await chat(server);
}

await main({ chat, stream, tools, 'structured output': structuredOutput, thoughts, images, 'long prompt': longPrompt, cancel });
