"""From the text of an answer to its thoughts, its content and its tool calls.

By families of models, not with `transformers.utils.chat_parsing` (5.23), which was measured first:
it drops what is no valid call (a region that is not JSON raises, and its text is gone), ends a call
at a closing tag inside of a string, keeps only the last of several parts of content, holds the
arguments back until a call is whole, takes 9 to 18 us for each token of content where these take 3
to 5, more than linear time in runs of white space, and over 3 s to import. Here each parser is one
coroutine over the text's characters: what it says does not depend on how the text is cut, no
character is looked at twice, and text that is no call stays content.
"""
