"""The grammar of an answer to a conversation: its calls, its form, and thoughts before either."""

from dataclasses import replace

from cluster.api.request_builder import Call, check_grammar
from cluster.api.tools.message_format import TemplateFormat
from cluster.api.tools.tool_use import ToolUse
from cluster.errors import InvalidRequest
from cluster.router.parser.call_grammar import (
    CallSyntax,
    Thoughts,
    behind_thoughts,
    possible_calls,
    required_calls,
)
from cluster.router.parser.families import ALL_MARKERS, MessageFormat
from cluster.router.parser.json_calls import ARGS
from cluster.router.parser.thoughts import CLOSE
from cluster.router.router import Router

NO_SCHEMA = {"type": "object"}  # of a function that need not be strict


async def formed(
    router: Router,
    call: Call,
    template: TemplateFormat,
    tools: ToolUse,
    message_format: MessageFormat,
    prompt: str,
) -> Call:
    """Return a call with the grammar of its answer, and with what must be seen of that.

    Raises:
        InvalidRequest: as `_with_grammar`, and if the grammar cannot be followed.
    """
    syntax = _syntax(router, template, message_format, prompt)
    call = _with_grammar(call, tools, syntax)
    await check_grammar(router, call)
    options = replace(
        call.text_options,
        shown_special_tokens=tuple(
            sorted(router.tokenizer.added_tokens(message_format.markers).values())
        ),
    )
    if message_format.reasoning:
        options = replace(
            options, thoughts="begun" if message_format.begins_in_thought else "possible"
        )
    return replace(call, text_options=options)


def _with_grammar(call: Call, tools: ToolUse, syntax: CallSyntax) -> Call:
    """Return a call with the grammar of its answer, if that has any form.

    Raises:
        InvalidRequest: if the tools clash with the form of the answer, or a schema cannot be
            followed.
    """
    if tools.must_call and _is_any_json(call):
        call = replace(call, grammar="", grammar_param="")  # as the arguments of calls are
    if tools.functions and call.grammar:
        raise InvalidRequest(
            f"{call.grammar_param}: cannot be together with tools; an answer has one form only",
            call.grammar_param,
        )
    try:
        if call.grammar and syntax.thoughts != "none":
            return replace(call, grammar=behind_thoughts(syntax, call.grammar))
        if not tools.is_enforced:
            return call
        _check_end(call)
        make = required_calls if tools.must_call else possible_calls
        schemas = {
            one.name: one.parameters if tools.must_call or one.is_strict else NO_SCHEMA
            for one in tools.functions
        }
        grammar = make(syntax, schemas, is_parallel=tools.is_parallel)
    except ValueError as error:
        param = call.grammar_param or "tools"
        raise InvalidRequest(f"{param}: {str(error)[:300]}", param) from None
    return replace(call, grammar=grammar, grammar_param="tools")


def _is_any_json(call: Call) -> bool:
    form = call.body.response_format
    is_json = form is not None and form.type == "json_object"
    return is_json and call.grammar_param == "response_format"


def _check_end(call: Call) -> None:
    for name, clash in (("ignore_eos", call.body.ignore_eos), ("min_tokens", call.body.min_tokens)):
        if clash:
            raise InvalidRequest(f"{name}: with these tools, the answer ends when it may", name)


def _syntax(
    router: Router, template: TemplateFormat, message_format: MessageFormat, prompt: str
) -> CallSyntax:
    tokens = router.tokenizer.added_tokens(ALL_MARKERS)
    thoughts: Thoughts = "none"
    if message_format.begins_in_thought:
        thoughts = "begun"
    elif message_format.reasoning and not prompt.rstrip().endswith(CLOSE):
        thoughts = "possible"
    return CallSyntax(
        family=message_format.tool_calls,
        thoughts=thoughts,
        tokens={text: one for text, one in tokens.items() if one < router.config.vocab_size},
        names_first=ARGS in template.source,
    )
