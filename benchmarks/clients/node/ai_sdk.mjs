// Vercel's AI SDK with its OpenAI-compatible, OpenAI (responses) and Anthropic providers.
import { createAnthropic } from '@ai-sdk/anthropic';
import { createOpenAI } from '@ai-sdk/openai';
import { createOpenAICompatible } from '@ai-sdk/openai-compatible';
import { generateText, Output, stepCountIs, streamText, tool } from 'ai';
import { z } from 'zod';
import { ANSWER, LONG_TEXT, MIN_LONG_TOKENS, PIXEL, QUESTION, RESULT, SEEN, expect, main } from './tasks.mjs';

const CITY = z.object({ city: z.string() });
const CHOICE = z.object({ city: z.enum(['Basel', 'Bern']) });

function models({ openaiUrl: baseURL, key: apiKey, model }) {
  const compatible = { name: 'moiety', baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true };
  return [
    createOpenAICompatible(compatible)(model),
    createOpenAI({ baseURL, apiKey }).responses(model),
    createAnthropic({ baseURL, apiKey })(model),
  ];
}

async function chat(server) {
  for (const model of models(server)) {
    const answer = await generateText({ model, prompt: QUESTION, maxOutputTokens: 20, maxRetries: 0 });
    expect(answer.text && answer.usage.inputTokens > 0, answer.content);
  }
}

async function stream(server) {
  for (const model of models(server)) {
    const running = streamText({ model, prompt: QUESTION, maxOutputTokens: 20, maxRetries: 0, onError: () => {} });
    let text = '';
    for await (const part of running.fullStream) {
      if (part.type === 'error') throw part.error;
      if (part.type === 'text-delta') text += part.text;
    }
    expect(text, text);
  }
}

async function tools(server) {
  for (const model of models(server)) {
    const temperature_of = tool({ description: 'Tells how warm it is.', inputSchema: CITY, execute: () => RESULT });
    const answer = await generateText({
      model, prompt: QUESTION, tools: { temperature_of }, stopWhen: stepCountIs(3), maxRetries: 0,
    });
    expect(answer.text === ANSWER, answer.content);
  }
}

async function structuredOutput(server) {
  for (const model of models(server)) {
    const output = Output.object({ schema: CHOICE });
    const answer = await generateText({ model, prompt: QUESTION, output, maxOutputTokens: 200, maxRetries: 0 });
    expect(typeof answer.output.city === 'string', answer.output);
  }
}

async function thoughts(server) {
  for (const model of models(server)) {
    const providerOptions = { anthropic: { thinking: { type: 'enabled', budgetTokens: 1024 } }, openai: { forceReasoning: true } };
    const answer = await generateText({ model, prompt: QUESTION, providerOptions, maxRetries: 0 });
    expect(answer.content.some((part) => part.type === 'reasoning'), answer.content);
  }
}

async function images(server) {
  const content = [{ type: 'text', text: 'What is it?' }, { type: 'image', image: Buffer.from(PIXEL, 'base64') }];
  for (const model of models(server)) {
    const answer = await generateText({ model, messages: [{ role: 'user', content }], maxRetries: 0 });
    expect(answer.text.includes(SEEN), answer.content);
  }
}

async function longPrompt(server) {
  for (const model of models(server)) {
    const answer = await generateText({ model, prompt: LONG_TEXT, maxOutputTokens: 8, maxRetries: 0 });
    expect(answer.usage.inputTokens > MIN_LONG_TOKENS, answer.usage);
  }
}

async function cancel(server) {
  for (const model of models(server)) {
    const abort = new AbortController();
    const running = streamText({ model, prompt: QUESTION, maxOutputTokens: 1000, abortSignal: abort.signal });
    for await (const _ of running.textStream) break;
    abort.abort();
  }
  await chat(server);
}

await main({ chat, stream, tools, 'structured output': structuredOutput, thoughts, images, 'long prompt': longPrompt, cancel });
