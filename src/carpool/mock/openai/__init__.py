"""The mock of OpenAI's API and of the compatible providers' APIs."""
