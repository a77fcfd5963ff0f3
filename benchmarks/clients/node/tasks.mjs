// Frame of a Node client's tasks: runs each by its name and prints one JSON line with its outcome, as tasks.py does.

export const QUESTION = 'How warm is it in Basel?';
export const CITY_SCHEMA = {
  type: 'object',
  properties: { city: { type: 'string' } },
  required: ['city'],
  additionalProperties: false,
};
export const CHOICE_SCHEMA = { ...CITY_SCHEMA, properties: { city: { type: 'string', enum: ['Basel', 'Bern'] } } };
export const RESULT = '17 degrees';
export const ANSWER = `The tool says: ${RESULT}`;
export const LONG_TEXT = Array.from({ length: 80 }, (_, number) => `Line ${number} says that the river rises.`).join(' ');
export const MIN_LONG_TOKENS = 1000;
export const PIXEL =
  'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==';
export const SEEN = 'an image of 1 × 1 pixels'; // in an answer to it
export const TIMEOUT_MS = 60_000;
const DETAIL_CHARS = 300;

export function expect(condition, got) {
  if (!condition) throw new Error(`got ${JSON.stringify(got)}`.slice(0, DETAIL_CHARS));
}

function serverOf(task) {
  const name = JSON.parse(process.env.MOIETY_TASK_SERVERS)[task].toUpperCase();
  const [url, key, model] = ['URL', 'KEY', 'MODEL'].map((part) => process.env[`MOIETY_${name}_${part}`]);
  return { url, key, model, openaiUrl: `${url}/v1` };
}

function isRefusal(error) {
  for (let one = error; one; one = one.cause ?? one.lastError) if ((one.status ?? one.statusCode) === 400) return true;
  return false;
}

async function outcomeOf(task, name) {
  try {
    await task(serverOf(name));
  } catch (error) {
    console.error(error);
    return [isRefusal(error) ? 'refused' : 'fail', String(error.message ?? error).slice(0, DETAIL_CHARS)];
  }
  return ['pass', ''];
}

export async function main(tasks) {
  for (const name of process.argv.slice(2)) {
    const [outcome, detail] = await outcomeOf(tasks[name], name);
    console.log(`{"task": ${JSON.stringify(name)}, "outcome": "${outcome}", "detail": ${JSON.stringify(detail)}}`);
  }
}
