// What the scripts for the Node SDKs share: see asking.py, which speaks the same language.
const fs = require('node:fs');

exports.FOUND = 'It was found.';
exports.LOOKUP = { type: 'object', properties: {}, additionalProperties: true };

exports.clientOptions = (ask) => {
  const options = { baseURL: ask.url, apiKey: ask.key, maxRetries: ask.retries };
  if (ask.timeout !== null) options.timeout = ask.timeout * 1000;
  if (ask.silence !== null) {
    // Node's own limits on silence, 300 s unless told otherwise, before and after the head.
    const { Agent } = require('undici');
    const limits = { headersTimeout: ask.silence * 1000, bodyTimeout: ask.silence * 1000 };
    options.fetchOptions = { dispatcher: new Agent(limits) };
  }
  return options;
};

exports.main = (answer, failure) => {
  const asks = JSON.parse(fs.readFileSync(process.argv[2], 'utf8'));
  const one = async (ask) => {
    try {
      return [ask.name, { turns: await answer(ask) }];
    } catch (error) {
      return [ask.name, { turns: [], error: { raised: error.constructor.name, ...failure(error) } }];
    }
  };
  console.log('ready');
  process.stdin.once('data', async () => {
    console.log(JSON.stringify(Object.fromEntries(await Promise.all(asks.map(one)))));
    process.exit(0);
  });
};
