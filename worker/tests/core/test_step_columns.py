"""Rows and tokens in columns read like the rows and tokens that they stand for."""

from __future__ import annotations

import msgspec
import numpy as np
from baleen_worker.messages import StreamColumns, to_columns
from baleen_worker.news import Audience, News, TokenNews
from baleen_worker.output import Output
from baleen_worker.packed import pack, unpack
from baleen_worker.request import FinishReason
from baleen_worker.step import PlannedRow
from baleen_worker.step_columns import DecodeColumns, OneTokenEach, PlannedRows

ROWS = [
    PlannedRow(4, 130, [7], 2, [9], True, 3),
    PlannedRow(1, 65, (), 2, (), True, 0, from_device=True),
    PlannedRow(0, 9, [8], 1, (), True, 9),
]
CHUNK = PlannedRow(2, 0, [1, 2, 3], 0, [5], False, 0)


def in_columns() -> PlannedRows:
    columns = DecodeColumns(
        slots=np.array([4, 1, 0]),
        starts=np.array([130, 65, 9]),
        token_ids=np.array([7, -1, 8]),
        output_indices=np.array([3, 0, 9]),
        first_new_page=np.array([2, 2, 1]),
        new_pages={0: [9]},
    )
    return PlannedRows(columns, [CHUNK])


def test_rows_in_columns_are_those_rows_however_they_are_read() -> None:
    assert list(in_columns()) == [*ROWS, CHUNK]
    rows = in_columns()
    assert [rows[index] for index in range(4)] == [*ROWS, CHUNK]
    assert (len(rows), rows[-1], rows[1:3]) == (4, CHUNK, ROWS[1:])
    assert [row.num_tokens for row in rows] == [1, 1, 1, 3]


def test_one_token_each_reads_as_lists() -> None:
    tokens = OneTokenEach(np.array([5, 6, 7]))
    assert (list(tokens), tokens[1], tokens[1:], len(tokens)) == ([[5], [6], [7]], [6], [[6], [7]], 3)


def test_news_of_several_streams_reach_each_in_order() -> None:
    audience = Audience(np.array([2, 1, 2]), np.array([10, 2**64 - 1, 11], np.uint64), np.array([0, 64, 0]))
    tokens = TokenNews(audience, np.array([100, 2**31, 102]))
    news = News([Output((2, 9), [1, 2], FinishReason.STOP, cached_tokens=3)])
    news.follow(News([], tokens))
    by_stream = {columns.stream: columns for columns in to_columns(news)}
    encoded = msgspec.msgpack.encode([*by_stream.values()], enc_hook=pack)
    for columns in msgspec.msgpack.decode(encoded, type=list[StreamColumns], dec_hook=unpack):
        assert columns == by_stream[columns.stream], "a frame is not what it was made from"
    assert list(by_stream[2].keys) == [9, 10, 11]
    assert list(by_stream[2].token_counts) == [2, 1, 1]
    assert list(by_stream[2].token_ids) == [1, 2, 100, 102]
    assert list(by_stream[2].finish_reasons) == [FinishReason.STOP, 0, 0]
    assert list(by_stream[2].cached_tokens) == [3, 0, 0]
    assert (list(by_stream[1].keys), list(by_stream[1].token_ids)) == ([2**64 - 1], [2**31])


def test_tokens_of_two_steps_in_one_turn_keep_their_order() -> None:
    def tokens(*token_ids: int) -> TokenNews:
        count = len(token_ids)
        zeros = np.zeros(count, np.int64)
        return TokenNews(Audience(zeros + 1, np.arange(count, dtype=np.uint64), zeros), np.array(token_ids))

    news = News()
    for step in (News([], tokens(5, 6)), News([Output((1, 0), [7], FinishReason.LENGTH)], None)):
        news.follow(step)
    assert [(output.id[1], list(output.token_ids)) for output in news] == [(0, [5]), (1, [6]), (0, [7])]
