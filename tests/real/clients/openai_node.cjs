// Asks through openai for Node: chat completions and responses, whole and streamed.
const { default: OpenAI } = require('openai');
const { FOUND, LOOKUP, clientOptions, main } = require('./asking.cjs');

const FUNCTION = { name: 'lookup', description: 'Looks something up.', parameters: LOOKUP };

const asTold = (text, functions, { input, output }, tier) => ({
  text,
  tools: functions.map(({ id, name, arguments: said }) => ({ id, name, input: JSON.parse(said) })),
  signatures: [],
  usage: { input, output },
  tier,
});

const chat = async (client, ask, said) => {
  const params = {
    model: ask.model,
    messages: said,
    max_completion_tokens: 400,
    ...(ask.tools && { tools: [{ type: 'function', function: FUNCTION }] }),
  };
  const whole = ask.stream
    ? await client.chat.completions.stream({ ...params, stream_options: { include_usage: true } }).finalChatCompletion()
    : await client.chat.completions.create(params);
  const { message } = whole.choices[0];
  const calls = message.tool_calls ?? [];
  said.push({ role: 'assistant', content: message.content, ...(calls.length && { tool_calls: calls }) });
  said.push(...calls.map((call) => ({ role: 'tool', tool_call_id: call.id, content: FOUND })));
  const functions = calls.map(({ id, function: called }) => ({ id, ...called }));
  const usage = { input: whole.usage.prompt_tokens, output: whole.usage.completion_tokens };
  return asTold(message.content ?? '', functions, usage, whole.service_tier);
};

const respond = async (client, ask, said) => {
  const params = {
    model: ask.model,
    input: said,
    max_output_tokens: 400,
    store: false,
    ...(ask.tools && { tools: [{ type: 'function', strict: false, ...FUNCTION }] }),
  };
  const final = ask.stream
    ? await client.responses.stream(params).finalResponse()
    : await client.responses.create(params);
  const calls = final.output.filter((item) => item.type === 'function_call');
  if (final.output_text) said.push({ role: 'assistant', content: final.output_text });
  for (const { call_id, name, arguments: asked } of calls) {
    said.push({ type: 'function_call', call_id, name, arguments: asked });
    said.push({ type: 'function_call_output', call_id, output: FOUND });
  }
  const usage = { input: final.usage.input_tokens, output: final.usage.output_tokens };
  return asTold(final.output_text, calls.map((call) => ({ ...call, id: call.call_id })), usage, final.service_tier);
};

const answer = async (ask) => {
  const client = new OpenAI(clientOptions(ask));
  const converse = ask.endpoint === 'chat' ? chat : respond;
  const said = [];
  const told = [];
  for (const turn of ask.turns) {
    said.push({ role: 'user', content: turn });
    told.push(await converse(client, ask, said));
  }
  return told;
};

const failure = (error) => ({ status: error.status ?? null, kind: error.type ?? null, said: String(error).slice(0, 300) });

main(answer, failure);
