"""A reward that a recipe names, with a signal from any text."""


def digits(completions, **columns):
    return [sum(map(str.isdigit, messages[0]["content"])) / 8 for messages in completions]
