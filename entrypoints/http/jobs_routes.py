"""``/jobs``: lists the jobs of agents with their pinned KV, and ends one."""

from __future__ import annotations

from fastapi import Request
from starlette.responses import Response

from ...runtime.tokenizer_manager import TokenizerManager
from ...scheduler.outcome import RequestRefused
from ..description.json_schema import COUNT, answered, flag, list_of, nullable, number, string
from ..description.openapi import Operation
from .keys import CLIENT, caller, sees_all
from .route import DELETE, GET, Route
from .wire.answers import JSONAnswer
from .wire.query import NAMESPACE_QUERY, read_namespace_query

_PIN = answered(
    {
        "rid": string("The step's request."),
        "index": COUNT,
        "tokens": COUNT,
        "expires_in_s": nullable(number("Null while the job's next step waits to take it over.", 0)),
        "is_claimed": flag("The job's next step has arrived."),
    },
    title="Pin",
)
_JOB = answered(
    {
        "job_id": string(),
        "parent_job_id": nullable(string("The job that started it.")),
        "age_s": number("Since its first request.", 0),
        "turns": COUNT,
        "open_requests": list_of(string("rid")),
        "is_over": flag("Its last step has ended."),
        "pinned_tokens": COUNT,
        "pins": list_of(_PIN),
        "waits_for": nullable(string("The tools that run since its last step, or `the user`.")),
        "last_calls": nullable(list_of(string("The tool's name."))),
        "returns_in_s": nullable(number("Predicted; null where its tool is unknown.", 0)),
        "prompt_tokens": COUNT,
        "hit_tokens": COUNT,
    },
    title="Job",
    optional=CLIENT,
)
_ABOUT = "Jobs are those of a namespace: name the cache_salt and extra_key that the job's requests have."
_LIST = Operation(
    summary="List the jobs",
    about=_ABOUT,
    tag="Jobs",
    query=NAMESPACE_QUERY,
    answer=answered({"jobs": list_of(_JOB)}, title="Jobs"),
    refusals=(504,),
)
_ONE = Operation(summary="One job", about=_ABOUT, tag="Jobs", query=NAMESPACE_QUERY, answer=_JOB, refusals=(404, 504))
_END = Operation(
    summary="End a job",
    about=f"Aborts its open requests and releases its pins. {_ABOUT}",
    tag="Jobs",
    query=NAMESPACE_QUERY,
    answer=answered(
        {"job_id": string(), "aborted": list_of(string("rid")), "released_tokens": COUNT}, title="EndedJob"
    ),
    refusals=(404, 504),
)


class JobsRoutes:
    def __init__(self, manager: TokenizerManager) -> None:
        self._control = manager.control
        self.routes = [
            Route("/jobs", self.jobs, GET, operation=_LIST),
            Route("/jobs/{job_id:rest}", self.job, GET, operation=_ONE),
            Route("/jobs/{job_id:rest}", self.end_job, DELETE, operation=_END),
        ]

    async def jobs(self, request: Request) -> Response:
        """The jobs of a namespace, the most recent last. The admin sees the jobs of all clients."""
        namespace, given = read_namespace_query(request)
        if not sees_all(request):
            return JSONAnswer({"jobs": await self._control.jobs(caller(request), namespace)})
        if given:
            name = next(iter(given))
            raise RequestRefused(f"{name} names a namespace of one client; add client=NAME", param=name)
        return JSONAnswer({"jobs": await self._control.jobs_of_all_clients()})

    async def job(self, request: Request, job_id: str) -> Response:
        namespace, _ = read_namespace_query(request)
        job = await self._control.job(caller(request), namespace, job_id)
        if job is None:
            raise _unknown(job_id)
        return JSONAnswer(job)

    async def end_job(self, request: Request, job_id: str) -> Response:
        namespace, _ = read_namespace_query(request)
        given_up = await self._control.end_job(caller(request), namespace, job_id)
        if given_up is None:
            raise _unknown(job_id)
        return JSONAnswer({"job_id": job_id, **given_up})


def _unknown(job_id: str) -> RequestRefused:
    return RequestRefused(
        f"no job {job_id[:100]!r} is known here: it was never seen, or is forgotten, or its requests have another "
        "cache_salt or extra_key",
        code="job_not_found",
        param="job_id",
    )
