import asyncio

from cluster.request import TokenEvent
from cluster.router.event_queue import EventQueue
from tests.patience import PATIENCE


async def test_a_reader_is_woken_with_and_without_events_however_late_it_comes() -> None:
    queue = EventQueue()
    async with asyncio.timeout(PATIENCE):
        queue.wake()
        assert await queue.get() == []
        reading = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        queue.wake()
        assert await reading == []
        event = TokenEvent("r", (1,))
        queue.put(event)
        queue.wake()
        assert await queue.get() == [event]
        reading = asyncio.create_task(queue.get())
        await asyncio.sleep(0)
        assert not reading.done()
        queue.put(event)
        assert await reading == [event]
