"""What an engine says of texts in numbers: their classes, and how relevant documents are to a query."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Unpack

from pagedcore.outputs import Classification, PairScore, RequestOutput
from pagedcore.request_options import OptionKeywords, read_options
from pagedcore.requests.classification import TextClassifier
from pagedcore.requests.embedding import Text, options_at, texts_of
from pagedcore.requests.input_processor import InputProcessor, ProcessedRequest
from pagedcore.requests.reranking import KEYWORDS, PairScorer, check_top_n, numbered, pair_list, pairs_of, ranked


class JudgesTexts:
    """The part of an ``Engine`` that classifies and reranks."""

    input_processor: InputProcessor

    @abstractmethod
    def _complete(
        self, processed: Iterable[ProcessedRequest], show_progress: bool | None = False
    ) -> list[RequestOutput]:
        """As ``Engine`` has it."""

    def classify(
        self, texts: Text | Iterable[Text], *, show_progress: bool | None = None, **options: Unpack[OptionKeywords]
    ) -> list[Classification]:
        """Say which class each text is of, in the same order; other requests advance in the same steps.

        For models whose class ends with ForSequenceClassification. What makes probabilities of their numbers is as
        their configuration says: one of all classes (softmax), each by itself (sigmoid), or neither, for a regression.

        Args:
            texts: any number, each text or token ids; one of them is one.
            show_progress: as for ``generate``.
            **options: as for ``add_request``.

        Raises:
            InvalidRequest: a text is refused, or this model has no classes; then none was started.
            RequestFailed: a text could not be computed.
        """
        asked, classifier = read_options(options, "show_progress"), TextClassifier.of(self.input_processor)
        processed = [classifier.process(one, options_at(asked, place)) for place, one in enumerate(texts_of(texts))]
        return [classifier.result_of(one) for one in self._complete(processed, show_progress)]

    def score_pairs(
        self, pairs: Iterable[tuple[str, str]], *, instruction: str | None = None, prompt_name: str | None = None,
        show_progress: bool | None = None, **options: Unpack[OptionKeywords],
    ) -> list[PairScore]:
        """Say how relevant the document of each pair is to its query, in the same order.

        Args:
            pairs: any number, each a query and a document.
            instruction: as for ``rerank``, like the others.
            prompt_name: the one of the directory's instructions that is used; "": none.
            show_progress: as for ``generate``.
            **options: as for ``add_request``.

        Raises:
            InvalidRequest: a pair or a value is refused, or this model reranks nothing; then none was started.
            RequestFailed: a pair could not be computed.
        """
        asked = read_options(options, *KEYWORDS, "show_progress")
        scorer = PairScorer.of(self.input_processor, instruction, prompt_name)
        processed = [scorer.process(one, options_at(asked, place)) for place, one in enumerate(pair_list(pairs))]
        return numbered([scorer.result_of(one) for one in self._complete(processed, show_progress)])

    def rerank(
        self, query: str, documents: str | Iterable[str], *, top_n: int | None = None,
        instruction: str | None = None, prompt_name: str | None = None, show_progress: bool | None = None,
        **options: Unpack[OptionKeywords],
    ) -> list[PairScore]:
        """Order documents by their relevance to a query and return their scores, best first.

        For classifiers with one class, and for models that answer yes or no, as their directory says in the files of
        sentence-transformers. What comes before the documents is computed once.

        Args:
            query: what is asked for.
            documents: any number; ``PairScore.index`` is the place of one.
            top_n: return so many of the best.
            instruction: what the model is told to look for, where its chat template has a place for that.
            prompt_name: as for ``score_pairs``, like the others.
            show_progress: as for ``generate``.
            **options: as for ``add_request``.

        Raises:
            InvalidRequest: a text or a value is refused, or this model reranks nothing; then none was started.
            RequestFailed: a document could not be computed.
        """
        most, pairs = check_top_n(top_n), pairs_of(query, documents)
        return ranked(self.score_pairs(pairs, instruction=instruction, prompt_name=prompt_name,
                                       show_progress=show_progress, **options), most)
