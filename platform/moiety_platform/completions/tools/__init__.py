"""Tools in requests and answers of text: what all APIs share, and OpenAI's words for chats."""
