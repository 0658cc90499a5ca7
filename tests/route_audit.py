"""The cost of each server route, its bounds, and the tests that show the bounds.

JSON that is parsed or written in one call holds the GIL in any thread; Python code in a worker shares it with
the event loop; tokenization and grammar compilation release it. Not bounded: the number of connections, and
`write_timeout_s`, which restarts whenever a client reads some of the reply.
"""

from __future__ import annotations

from typing import NamedTuple

from logprobe.analysis.covers import MAX_STEPS, MIN_STEPS
from logprobe.analysis.healing import ROWS_AT_ONCE as HEALING_ROWS
from logprobe.analysis.schemas import MAX_WAYS, MAX_WAYS_IN_ALL
from logprobe.next_token.fields import MEMBERS_A_ROW
from logprobe.server.http.gate import PIECE_BYTES
from logprobe.server.http.protocol import LOG_EVERY_S, MAX_HEADER_BYTES, MAX_PIPELINED
from logprobe.server.http.workers import QUICK_BYTES, QUICK_ENTRIES, QUICK_PROMPTS
from logprobe.server.members import ROWS_AT_ONCE
from logprobe.server.openai.bodies import MAX_LISTED
from logprobe.server.routes.loglikelihood import SCORE_ENTRIES
from logprobe.text.channels.calls import MAX_DEPTH as MAX_CALL_DEPTH


class Audited(NamedTuple):
    """Cost of some routes, or of any request to any path; a route may be in several entries."""

    what: tuple[str, ...]  # "METHOD path", or "any path: ..." if it is not a route
    costs: str  # event loop, workers, memory, and what is kept afterwards
    bounds: str  # in backticks: only settings and limits
    shown: tuple[str, ...]  # tests, relative to TESTS


TESTS = "tests/server"

READ = (
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/responses",
    "POST /v1/loglikelihood",
    "POST /v1/label",
    "POST /generative_scoring",
    "POST /v1/score",
    "POST /v1/judge",
    "POST /v1/uncertainty",
    "POST /v1/rerank",
    "POST /v2/rerank",
    "POST /rerank",
    "POST /v1/next_token_logprobs",
    "POST /v1/hidden_states",
    "POST /tokenize",
    "POST /v1/tokenize",
    "POST /detokenize",
    "POST /v1/detokenize",
)

AUDIT = (
    Audited(
        ("any path: a header",),
        "a connection, and the bytes so far",
        f"`header_timeout_s`, also for the next header on a connection; {MAX_HEADER_BYTES:,} bytes",
        (
            "attacks/test_slow.py::test_a_header_that_does_not_end_closes_the_connection",
            "attacks/test_slow.py::test_a_second_header_has_its_time_too",
            "attacks/test_slow.py::test_a_header_without_end_is_cut_off",
            "attacks/test_words.py::test_nor_does_one_of_a_header",
            "attacks/test_smuggling.py::test_a_header_that_is_too_large_is_a_431",
            "attacks/test_smuggling.py::test_a_faulty_request_is_a_400_and_nothing_after_it_is_run",
        ),
    ),
    Audited(
        ("any path: a body that its route does not read",),
        "a connection; the bytes are dropped",
        "`header_timeout_s` after the reply",
        ("attacks/test_slow.py::test_a_body_that_nobody_asked_for_ends_in_time",),
    ),
    Audited(
        ("any path: requests sent before the replies to earlier ones",),
        "the headers, and the bodies that came with them",
        f"{MAX_PIPELINED} requests; then the connection closes after the replies to these",
        ("attacks/test_smuggling.py::test_pipelined_requests_are_bounded",),
    ),
    Audited(
        ("any path: trailers",),
        "a connection; the trailers are dropped",
        f"`header_timeout_s` after the reply, or `body_timeout_s` before it; {MAX_HEADER_BYTES:,} bytes",
        (
            "attacks/test_slow.py::test_trailers_without_end_are_cut_off",
            "attacks/test_slow.py::test_trailers_that_do_not_end_in_time_close_the_connection",
        ),
    ),
    Audited(
        ("any path: an idle connection",),
        "a socket",
        "`header_timeout_s`, whatever bytes come that begin no request",
        (
            "attacks/test_slow.py::test_bytes_that_begin_no_request_keep_no_connection",
            "attacks/test_slow.py::test_nor_do_they_where_silence_follows",
            "attacks/test_slow.py::test_a_client_that_closes_its_half_between_requests_gets_nothing_more",
        ),
    ),
    Audited(
        ("any path: a reply that is not read",),
        f"the reply, and {PIECE_BYTES:,} bytes of it in the connection; a larger one is sent in such pieces, "
        "others served between any two",
        "`write_timeout_s` from when the client last took all that it was sent; replies of the engine count "
        "in `max_requests`, `max_tokens_in_flight` and `max_logprob_bytes` until they were taken",
        (
            "attacks/test_unread.py::test_a_reply_counts_until_it_is_read",
            "attacks/test_unread.py::test_a_reply_that_is_not_taken_closes_the_connection",
        ),
    ),
    Audited(
        ("any path with a key, of a server of several models: one that is not loaded",),
        "a load, by all cores and for seconds; the model's weights and pool, which stay",
        "one load at a time, what is loaded together within `max_models_bytes`; who waits counts in "
        "`max_requests` of the route. Clients that ask for more models in turn than fit have them loaded "
        "again and again",
        (
            "test_models.py::test_who_asks_at_once_waits_for_one_load",
            "test_models.py::test_the_one_unused_longest_leaves_where_memory_is_short",
            "test_models.py::test_a_model_in_use_never_leaves",
        ),
    ),
    Audited(
        ("any path: no HTTP, or another protocol",),
        "a count, now and then a line of the log",
        f"the connection closes, or the request is served as HTTP; a line in {LOG_EVERY_S:.0f} s at most",
        (
            "attacks/test_words.py::test_connections_that_send_rubbish_are_counted_and_logged_now_and_then",
            "test_bad_connections.py::test_a_line_comes_at_once_and_then_in_a_while_with_the_number_since",
        ),
    ),
    Audited(
        ("any path: refused by its `Host`, its `Origin`, its key, or as no route",),
        "a look at the header; a short reply that names what was sent, shortened",
        "nothing of a body is read first; `allowed_host`, `allowed_origins`, `api_key`",
        (
            "attacks/test_browsers.py::test_a_name_that_is_not_the_servers_is_refused",
            "attacks/test_browsers.py::test_a_page_of_another_origin_is_refused",
            "test_behaviour.py::test_keys_let_in_who_brings_one",
            "attacks/test_words.py::test_nor_does_one_of_a_header",
        ),
    ),
    Audited(
        ("GET /health", "GET /ready", "GET /ping", "POST /ping", "GET /version"),
        "a look at the engine's clock, on the event loop; nothing kept",
        "need no key and are always answered; `stall_s` is how long a step may hang before they say so",
        (
            "attacks/test_gets.py::test_of_a_route_that_waits_a_bound_is_in_progress_until_it_is_sent",
            "attacks/test_processors.py::test_an_engine_that_hangs_is_told_and_every_waiter_ends",
        ),
    ),
    Audited(
        ("GET /", "GET /docs"),
        "the page's bytes, put together for the first who asks, on the event loop, and kept",
        "made once, of the server's own files; all replies share the bytes",
        ("test_page.py::test_the_page_needs_no_key_and_tells_browsers_what_it_may_do",),
    ),
    Audited(
        (
            "GET /v1/tokenizer",
            "GET /tokenizer_info",
            "GET /v1/tokenizer_info",
            "GET /v1/logits_processors",
            "GET /openapi.json",
        ),
        "a document, made for the first who asks, in a worker, and kept",
        "made once for all who ask meanwhile; all replies share the bytes; 304 for who has them",
        (
            "attacks/test_gets.py::test_as_many_gets_as_one_likes_hold_nobody_up",
            "attacks/test_gets.py::test_who_has_a_document_is_not_sent_it_again",
            "attacks/test_gets.py::test_a_document_is_made_once_for_all_who_ask",
        ),
    ),
    Audited(
        ("GET /v1/models", "GET /v1/models/{model:path}"),
        "a short reply, made anew on the event loop; nothing kept",
        "as long as the operator's list (`lora_modules`); a name is repeated shortened",
        (
            "attacks/test_gets.py::test_as_many_gets_as_one_likes_hold_nobody_up",
            "attacks/test_words.py::test_nor_does_one_of_a_header",
        ),
    ),
    Audited(
        ("GET /v1/capabilities", "GET /server_info", "GET /get_world_size"),
        "a short reply, made anew on the event loop; nothing kept",
        "of a size that no client changes",
        (
            "attacks/test_gets.py::test_as_many_gets_as_one_likes_hold_nobody_up",
            "attacks/test_sizes.py::test_all_limits_are_told",
        ),
    ),
    Audited(
        ("POST /reset_prefix_cache",),
        "cached prefixes, which are computed anew where they are asked for again",
        "`operator_key`",
        (
            "test_operator.py::test_who_is_no_operator_may_do_nothing",
            "attacks/test_operators.py::test_whoever_is_no_operator_changes_nothing",
            "attacks/test_operators.py::test_an_operators_hostile_folder_is_a_400_and_holds_nobody_up",
        ),
    ),
    Audited(
        ("GET /metrics",),
        "all figures as text, written beside the event loop",
        "counted by routes, models, statuses and fields that the server knows, so no client's words make it "
        "longer; one at a time, the next for all who ask meanwhile, also where the server is full; on "
        "`metrics_port` the same, without a key",
        (
            "attacks/test_gets.py::test_figures_are_written_beside_the_event_loop_and_once_for_all_who_ask_meanwhile",
            "attacks/test_gets.py::test_as_many_gets_as_one_likes_hold_nobody_up",
            "attacks/test_words.py::test_invented_fields_are_counted_as_other",
            "test_unknown_fields.py::test_a_clients_words_are_bounded_and_stay_out_of_metrics_and_the_log",
            "attacks/test_words.py::test_names_of_weights_that_are_not_loaded_are_kept_nowhere",
            "test_metrics_port.py::test_nothing_else_is_there",
        ),
    ),
    Audited(
        READ,
        f"the body's bytes, then its values: on the event loop up to {QUICK_BYTES:,} bytes that hold no more "
        f"than {QUICK_PROMPTS} prompts and nothing that takes long to understand (grammars, banned words, a "
        "text with several continuations), else in a worker",
        "`body_timeout_s`, `max_body_bytes`, `max_body_values` (before anything is decoded), `max_depth`; of "
        "a route `max_requests` and `max_waiting` at once, those whose bodies are still to come too",
        (
            "attacks/test_gets.py::test_bodies_that_do_not_come_count_as_work",
            "attacks/test_monopoly.py::test_another_client_is_served_while_one_has_half_sent_all_its_bodies",
            "attacks/test_monopoly.py::test_bodies_that_wait_to_be_read_have_a_reserve_too",
            "test_workers.py::test_readers_take_turns_between_callers",
            "attacks/test_sizes.py::test_a_name_that_is_no_text_is_not_built_to_choose_the_model",
            "attacks/test_slow.py::test_a_body_that_does_not_come_is_a_408",
            "test_behaviour.py::test_a_body_that_is_too_large_is_refused",
            "attacks/test_sizes.py::test_a_body_beyond_a_limit_is_a_400_that_names_it_and_holds_nobody_up",
            "attacks/test_sizes.py::test_a_body_that_is_nested_deeply_is_a_400",
            "attacks/test_sizes.py::test_what_rejected_bodies_took_is_returned",
            "attacks/test_words.py::test_a_field_of_eight_megabytes_holds_nobody_up",
            "attacks/test_fuzz.py::test_bytes_that_are_no_body_are_answered",
            "test_workers.py::test_a_large_body_is_read_in_a_worker_and_a_small_one_at_once",
            "test_workers.py::test_a_small_body_whose_bytes_do_not_bound_its_time_is_understood_in_a_worker",
        ),
    ),
    Audited(
        ("POST /v1/chat/completions", "POST /v1/completions", "POST /v1/responses"),
        "the engine's steps; tokens and their logprobs until the reply was taken; a grammar, compiled in a "
        "worker; what each new token is compared with",
        "`max_requests`, `max_tokens_in_flight`, `max_logprob_bytes`, an eighth more of each for who holds "
        "little; `max_waiting` of a client wait for room, for `wait_timeout_s`; `max_logprobs`, "
        "`max_logprob_token_ids`, `max_token_ids`, `max_bad_words`, `max_stop`, `max_stop_bytes`; "
        "`max_grammar_bytes`, `max_grammar_parts`, `max_choices`; a client that leaves ends its request",
        (
            "test_behaviour.py::test_tokens_and_bytes_of_logprobs_are_limited",
            "test_behaviour.py::test_a_prompt_counts_once_for_each_choice_that_begins_with_it",
            "test_behaviour.py::test_a_full_server_says_when_to_come_back",
            "test_behaviour.py::test_requests_wait_for_room_and_are_served_once_there_is",
            "test_behaviour.py::test_a_client_that_leaves_while_it_waits_gives_its_place_back",
            "test_behaviour.py::test_a_server_that_ends_tells_requests_that_wait",
            "attacks/test_monopoly.py::test_another_client_is_served_while_requests_of_one_wait",
            "test_behaviour.py::test_a_client_that_leaves_frees_its_place_at_once",
            "attacks/test_monopoly.py::test_another_client_is_served_while_one_has_all_there_is",
            "attacks/test_sizes.py::test_named_ids_are_counted_as_the_bytes_that_they_take",
            "attacks/test_grammars.py::test_a_hostile_grammar_is_a_400_or_served_and_holds_nobody_up",
            "attacks/test_grammars.py::test_an_ambiguous_grammar_is_followed_as_far_as_its_bounds_go",
            "attacks/test_fuzz.py::test_every_body_is_answered",
        ),
    ),
    Audited(
        ("POST /v1/chat/completions", "POST /v1/completions", "POST /v1/responses"),
        f"a reply, or a part of one that is streamed: written in a worker beyond {QUICK_ENTRIES:,} tokens "
        "and alternatives of these, a prompt's once for each choice that echoes it, else on the event loop",
        "`max_logprob_bytes`; a stream waits for its reader after `buffer_rows`",
        (
            "test_behaviour.py::test_a_slow_reader_is_paused_and_loses_nothing",
            "attacks/test_unread.py::test_a_reply_counts_until_it_is_read",
            "test_workers.py::test_what_a_stream_tells_of_a_long_prompt_is_written_in_a_worker",
            "test_workers.py::test_a_reply_of_many_alternatives_is_written_in_a_worker_however_few_its_tokens",
            "test_workers.py::test_a_prompt_that_each_choice_begins_with_counts_once_for_each_and_is_made_once",
            "test_workers.py::test_the_end_of_a_long_response_is_written_in_a_worker",
            "test_workers.py::test_reading_is_refused_where_too_many_wait_and_writing_waits_for_none_of_them",
        ),
    ),
    Audited(
        ("POST /v1/chat/completions", "POST /v1/responses"),
        "calls of tools, read once their last mark or the end of a choice is there: in time linear in their "
        f"text; in a worker where what the choices have held back comes to {QUICK_ENTRIES:,} tokens",
        f"a call is nested {MAX_CALL_DEPTH} deep at most, what is deeper is content; the model's context",
        (
            "attacks/test_calls.py::test_a_nested_call_is_read_in_linear_time",
            "attacks/test_calls.py::test_a_call_that_the_prompt_has_begun_is_read_beside_the_event_loop",
        ),
    ),
    Audited(
        ("POST /v1/chat/completions", "POST /v1/completions", "POST /v1/responses"),
        'with `field_logprobs: "members"`, once a choice has ended: the values that its schema names, looked '
        "up in a worker, and a next-token row, as wide as the vocabulary, for each way to spell them",
        f"`max_field_rows` of all choices and values of a reply, {ROWS_AT_ONCE} of them at once, "
        f"{MEMBERS_A_ROW} members looked at for each; they count in `max_requests`, `max_tokens_in_flight` "
        f"and `max_logprob_bytes` before the reply begins; {MAX_WAYS:,} alternatives of a place of the "
        f"schema, {MAX_WAYS_IN_ALL:,} in all, counted before they are laid out; a client that leaves ends "
        "them",
        (
            "attacks/test_grammars.py::test_alternatives_are_counted_before_they_are_laid_out",
            "attacks/test_grammars.py::test_a_value_is_read_of_many_alternatives_once",
            "test_fields.py::test_rows_of_a_reply_are_capped_for_all_of_its_values_and_choices",
            "test_fields.py::test_rows_are_counted_before_the_reply_begins",
            "test_fields.py::test_members_need_raw_rows_and_a_schema_that_can_be_followed",
            "test_fields.py::test_a_client_that_leaves_gives_its_rows_up",
        ),
    ),
    Audited(
        ("POST /v1/chat/completions", "POST /v1/responses", "POST /tokenize", "POST /v1/tokenize"),
        "a conversation laid out by the model's template (Python) and tokenised; in a worker unless it is "
        "small and plain; a template whose cost its input does not bound, in a process of its own",
        "`max_messages`, `max_text_bytes`, the model's context; `max_depth`; 5 s and 512 MB of that process",
        (
            "attacks/test_templates.py::test_an_endless_template_leaves_the_server_to_others",
            "attacks/test_sizes.py::test_a_body_beyond_a_limit_is_a_400_that_names_it_and_holds_nobody_up",
            "attacks/test_stored.py::test_a_long_name_of_an_empty_field_is_refused_and_not_kept",
        ),
    ),
    Audited(
        ("POST /v1/completions",),
        "each prompt tokenised; the fields beside the prompts read once for each of them",
        "`max_requests` prompts, `max_text_bytes`, the model's context; `max_body_values` for prompts times "
        "values beside them",
        ("attacks/test_sizes.py::test_a_body_beyond_a_limit_is_a_400_that_names_it_and_holds_nobody_up",),
    ),
    Audited(
        ("POST /v1/responses",),
        "the reply and its conversation, kept as JSON until younger ones need the room: the oldest of the "
        "key that has most goes; an earlier conversation, decoded in a worker",
        "`max_stored`, `max_stored_bytes`, of all clients together; no conversation beyond `max_body_bytes` "
        "is kept",
        (
            "attacks/test_stored.py::test_stored_messages_are_in_the_bound_of_what_is_stored",
            "test_stored.py::test_one_owner_pushes_out_no_others",
            "test_stored.py::test_the_conversation_counts_as_the_response_does",
            "test_stored.py::test_a_conversation_that_no_body_could_hold_is_not_kept",
            "test_responses.py::test_what_is_stored_is_bounded_in_bytes_and_the_oldest_go_first",
            "test_workers.py::test_what_is_stored_is_read_in_a_worker_however_small_the_body",
        ),
    ),
    Audited(
        ("GET /v1/responses/{response_id}", "DELETE /v1/responses/{response_id}"),
        "a look into a table, on the event loop; the reply is the bytes that are kept",
        "`max_stored_bytes`; found by the key that made it alone",
        (
            "attacks/test_stored.py::test_a_stored_reply_is_there_for_its_own_key_alone",
            "attacks/test_stored.py::test_no_guess_finds_or_ends_what_another_key_stored",
            "attacks/test_words.py::test_nor_does_one_of_a_header",
        ),
    ),
    Audited(
        ("GET /v1/responses/{response_id}/input_items",),
        f"a conversation, decoded whole, and a page of it as JSON; in a worker beyond {QUICK_BYTES:,} bytes",
        f"`max_stored_bytes`, `max_requests` at once; {MAX_LISTED} messages a page",
        (
            "attacks/test_stored.py::test_a_stored_reply_is_there_for_its_own_key_alone",
            "attacks/test_words.py::test_nor_does_one_of_a_query",
        ),
    ),
    Audited(
        ("POST /v1/loglikelihood",),
        "the context tokenised with each continuation; the engine's steps, and where a token spans the "
        f"boundary up to {MAX_STEPS:,} next-token rows for continuations after the same tokens, or "
        f"{MIN_STEPS} for each, admitted {HEALING_ROWS} at a time; the reply, in a worker as Arrow "
        f"or beyond {QUICK_ENTRIES:,} tokens, each continuation as {SCORE_ENTRIES} more",
        "`max_requests` continuations, `max_messages`, `max_text_bytes` for the context or conversation "
        "times the continuations, the model's context for a context of ids; `max_requests`, "
        "`max_tokens_in_flight`, `max_logprob_bytes`",
        (
            "attacks/test_sizes.py::test_a_body_beyond_a_limit_is_a_400_that_names_it_and_holds_nobody_up",
            "attacks/test_sizes.py::test_a_conversation_counts_once_for_each_continuation",
            "test_workers.py::test_a_score_of_many_continuations_is_written_in_a_worker",
            "test_workers.py::test_a_score_as_arrow_is_written_in_a_worker_however_small",
            "attacks/test_fuzz.py::test_every_body_is_answered",
        ),
    ),
    Audited(
        ("POST /v1/label", "POST /v1/judge"),
        "each text tokenised with each answer, a conversation laid out once; the engine's steps, and where a "
        f"token spans the boundary up to {MAX_STEPS:,} next-token rows a prompt, or {MIN_STEPS} an answer, "
        f"admitted {HEALING_ROWS} at a time; the reply, "
        f"in a worker beyond {QUICK_ENTRIES:,} tokens, each answer as {SCORE_ENTRIES} more",
        "`max_requests` prompts times answers, before any is compared or tokenised; `max_messages`; "
        "`max_text_bytes` for the prompts times the answers; `max_requests`, `max_tokens_in_flight`, "
        "`max_logprob_bytes`",
        (
            "attacks/test_sizes.py::test_a_body_beyond_a_limit_is_a_400_that_names_it_and_holds_nobody_up",
            "attacks/test_words.py::test_a_refusal_repeats_no_more_than_a_name_of_what_was_sent",
            "test_workers.py::test_a_small_body_whose_bytes_do_not_bound_its_time_is_understood_in_a_worker",
            "attacks/test_fuzz.py::test_every_body_is_answered",
        ),
    ),
    Audited(
        ("POST /generative_scoring", "POST /v1/score"),
        "the query tokenised once, or with each item (`/v1/score`); one request an item; the engine's steps; "
        f"the reply, in a worker beyond {QUICK_ENTRIES:,} items times labels",
        "`max_requests` items, `max_logprob_token_ids` labels, `max_text_bytes`, for SGLang's route the "
        "query times the items; the model's context for the query; `max_requests`, `max_tokens_in_flight`, "
        "`max_logprob_bytes`",
        (
            "test_generative_scoring.py::test_what_cannot_be_scored_is_a_400_that_names_the_field",
            "test_workers.py::test_a_small_body_whose_bytes_do_not_bound_its_time_is_understood_in_a_worker",
            "attacks/test_fuzz.py::test_every_body_is_answered",
        ),
    ),
    Audited(
        ("POST /v1/uncertainty",),
        f"one request an answer, made in a worker beyond {QUICK_PROMPTS}; the engine's steps; the reply, in "
        f"a worker beyond {QUICK_ENTRIES:,} tokens and alternatives of both distributions",
        "128 answers; `max_text_bytes`, `max_messages`; `max_logprobs` alternatives; `max_requests`, "
        "`max_tokens_in_flight`, `max_logprob_bytes`",
        (
            "attacks/test_sizes.py::test_a_body_beyond_a_limit_is_a_400_that_names_it_and_holds_nobody_up",
            "attacks/test_words.py::test_a_refusal_repeats_no_more_than_a_name_of_what_was_sent",
            "test_workers.py::test_a_small_body_whose_bytes_do_not_bound_its_time_is_understood_in_a_worker",
            "attacks/test_fuzz.py::test_every_body_is_answered",
        ),
    ),
    Audited(
        ("POST /v1/rerank", "POST /v2/rerank", "POST /rerank"),
        "the query and the layout tokenised with each document; the engine's steps, two requests a document; "
        f"the reply, in a worker beyond {QUICK_ENTRIES:,} tokens, each answer as {SCORE_ENTRIES} more",
        "`max_requests` documents; `max_text_bytes` for the documents, and for the query and the layout "
        "times them, before they are joined; `max_requests`, `max_tokens_in_flight`, `max_logprob_bytes`",
        (
            "attacks/test_sizes.py::test_a_body_beyond_a_limit_is_a_400_that_names_it_and_holds_nobody_up",
            "test_workers.py::test_answers_of_many_documents_are_written_in_a_worker",
            "test_workers.py::test_a_small_body_whose_bytes_do_not_bound_its_time_is_understood_in_a_worker",
            "attacks/test_fuzz.py::test_every_body_is_answered",
        ),
    ),
    Audited(
        ("POST /v1/next_token_logprobs",),
        "prompts tokenised; the engine's steps; of each prompt a row as wide as the vocabulary until it was "
        "taken; rows written one by one on the event loop, which serves others between them",
        "`max_requests` prompts, `max_text_bytes`; `max_tokens_in_flight`, `max_logprob_bytes`",
        (
            "attacks/test_sizes.py::test_a_body_beyond_a_limit_is_a_400_that_names_it_and_holds_nobody_up",
            "attacks/test_unread.py::test_a_reply_counts_until_it_is_read",
            "attacks/test_unread.py::test_a_reply_that_is_not_taken_closes_the_connection",
            "attacks/test_fuzz.py::test_every_body_is_answered",
        ),
    ),
    Audited(
        ("POST /v1/hidden_states",),
        "prompts tokenised; the engine's steps, without the prefix cache; the states of each prompt's tokens "
        "until they were taken; tensors written one by one on the event loop, which "
        "serves others between them",
        "`max_requests` prompts, `max_text_bytes`; `max_tokens_in_flight`; `max_logprob_bytes` for the "
        "states of all tokens and layers",
        (
            "attacks/test_sizes.py::test_a_body_beyond_a_limit_is_a_400_that_names_it_and_holds_nobody_up",
            "attacks/test_fuzz.py::test_every_body_is_answered",
            "test_hidden_states.py::test_states_beyond_the_limit_are_refused",
        ),
    ),
    Audited(
        ("POST /tokenize", "POST /v1/tokenize"),
        "a text tokenised; a list of its ids, as long as the text at most, and their words where asked",
        "`max_text_bytes`",
        (
            "attacks/test_sizes.py::test_a_body_beyond_a_limit_is_a_400_that_names_it_and_holds_nobody_up",
            "attacks/test_fuzz.py::test_every_body_is_answered",
        ),
    ),
    Audited(
        ("POST /v1/load_lora_adapter", "POST /v1/unload_lora_adapter", "POST /update_weights_from_disk"),
        "files of the server's machine, read on a thread of their own; the weights' memory, until they are "
        "dropped or replaced",
        "`operator_key`",
        (
            "test_operator.py::test_who_is_no_operator_may_do_nothing",
            "attacks/test_operators.py::test_whoever_is_no_operator_changes_nothing",
            "attacks/test_operators.py::test_an_operators_hostile_folder_is_a_400_and_holds_nobody_up",
        ),
    ),
    Audited(
        ("POST /detokenize", "POST /v1/detokenize"),
        "the bytes of each id, as one text",
        "`max_body_values` ids, each as long as the longest token",
        ("attacks/test_fuzz.py::test_every_body_is_answered",),
    ),
)
