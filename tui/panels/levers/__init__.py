"""The levers: a list that is edited in place, beside the chat or with history and effects."""
