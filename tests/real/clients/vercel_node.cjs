// Does its tasks through Vercel's AI SDK, which holds every answer against strict schemas of its own: see tasks.py.
const { pathToFileURL } = require('node:url');
const { FOUND, main } = require('./asking.cjs');

// Its packages are ES modules, which are not looked for in NODE_PATH.
const load = (name) => import(pathToFileURL(require.resolve(name)));
const parts = Promise.all(['ai', '@ai-sdk/anthropic', '@ai-sdk/openai', 'zod'].map(load));

const modelOf = ({ endpoint, url, key, model }, createAnthropic, createOpenAI) => {
  const options = { baseURL: url, apiKey: key };
  if (endpoint === 'messages') return createAnthropic(options)(model);
  return endpoint === 'chat' ? createOpenAI(options).chat(model) : createOpenAI(options).responses(model);
};

const told = (text, object = null, called = []) => [{ text, object, called }];

const answer = async (ask) => {
  const [ai, { createAnthropic }, { createOpenAI }, { z }] = await parts;
  const asked = { model: modelOf(ask, createAnthropic, createOpenAI), prompt: ask.prompt, maxRetries: 0 };
  const schema = z.object({
    city: z.string(),
    days: z.number().int(),
    stops: z.array(z.object({ name: z.string(), nights: z.number().int() })),
    note: z.string().nullable(),
  });
  switch (ask.task) {
    case 'text':
      return told((await ai.generateText(asked)).text);
    case 'stream':
      return told(await ai.streamText(asked).text);
    case 'object':
      return told('', (await ai.generateObject({ ...asked, schema })).object);
    case 'parts': {
      const { partialOutputStream, output } = ai.streamText({ ...asked, output: ai.Output.object({ schema }) });
      for await (const _ of partialOutputStream);
      return told('', await output);
    }
    default: {
      const called = [];
      const execute = async (input) => {
        called.push(input);
        return FOUND;
      };
      const inputSchema = z.object({ query: z.string() });
      const lookup = ai.tool({ description: 'Looks something up.', inputSchema, execute });
      const { text } = await ai.generateText({ ...asked, tools: { lookup }, stopWhen: ai.stepCountIs(3) });
      return told(text, null, called);
    }
  }
};

const failure = (error) => ({ said: String(error).slice(0, 600) });

main(answer, failure);
