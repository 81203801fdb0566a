// Asks through @anthropic-ai/sdk, whole answers and streams.
const { default: Anthropic } = require('@anthropic-ai/sdk');
const { FOUND, LOOKUP, clientOptions, main } = require('./asking.cjs');

const TOOL = { name: 'lookup', description: 'Looks something up.', input_schema: LOOKUP };

const results = (messages) =>
  (messages.at(-1)?.content ?? [])
    .filter((block) => block.type === 'tool_use')
    .map((block) => ({ type: 'tool_result', tool_use_id: block.id, content: FOUND }));

const asTold = ({ content, usage }) => ({
  text: content.filter((block) => block.type === 'text').map((block) => block.text).join(''),
  tools: content.filter((block) => block.type === 'tool_use').map(({ id, name, input }) => ({ id, name, input })),
  signatures: content.filter((block) => block.type === 'thinking').map((block) => block.signature),
  usage: {
    input: usage.input_tokens + (usage.cache_creation_input_tokens ?? 0) + (usage.cache_read_input_tokens ?? 0),
    output: usage.output_tokens,
  },
});

const answer = async (ask) => {
  const client = new Anthropic(clientOptions(ask));
  const messages = [];
  const told = [];
  for (const turn of ask.turns) {
    messages.push({ role: 'user', content: [...results(messages), { type: 'text', text: turn }] });
    const params = { model: ask.model, max_tokens: 400, messages, ...(ask.tools && { tools: [TOOL] }) };
    const said = ask.stream
      ? await client.messages.stream(params).finalMessage()
      : await client.messages.create(params);
    messages.push({ role: 'assistant', content: said.content });
    told.push(asTold(said));
  }
  return told;
};

const failure = (error) => ({ status: error.status ?? null, kind: error.error?.error?.type ?? null });

main(answer, failure);
