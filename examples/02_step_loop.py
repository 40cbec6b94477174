"""The step level: you own the loop, the engine advances every request it can by one step at a time.

A finished request is either removed, which frees its blocks, or extended: it goes on with what the cache still holds.
"""

from collections import deque

from pagedcore import Engine, Request, SamplingParams


def main() -> None:
    """Serve a queue of prompts, ask one of them a second question, and print tokens as they come."""
    prompts = deque(["What is 2 + 3?", "What is 12 + 30?", "What is 7 - 4?"])
    params = SamplingParams(max_tokens=32)

    with Engine.from_pretrained("demo") as engine:
        pool: list[Request] = []
        while prompts:
            pool.append(engine.add_request(prompts.popleft(), params))
        follow_ups = {pool[0].request_id: "\nWhat is 4 + 4?"}

        while engine.has_pending_requests():
            engine.step()
            for request in list(pool):
                for token in request.take_new_tokens():
                    print(f"request {request.request_id[:6]}  new token {token}")
                if request.is_done:
                    print(f"request {request.request_id[:6]}  says {request.output().outputs[0].text.strip()!r}")
                    if follow_up := follow_ups.pop(request.request_id, None):
                        request.extend(follow_up)
                        print(f"request {request.request_id[:6]}  goes on with {follow_up.strip()!r}")
                    else:
                        request.remove()
                        pool.remove(request)

        print(f"blocks still in use: {engine.stats().num_blocks_used}")


if __name__ == "__main__":
    main()
