# A worker with its kernels, and the small model for trying it out. From the root of a checkout, for GPUs and for CPUs:
#   docker build -f deploy/docker/worker.Dockerfile -t baleen-worker:0.1.0 .
#   docker build -f deploy/docker/worker.Dockerfile -t baleen-worker:laptop --build-arg VARIANT=cpu .
FROM rust:1.88-slim-bookworm AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++ make python3-venv \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .
RUN python3 -m venv /build && /build/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /wheels ./kernels .

FROM python:3.11-slim-bookworm
ARG VARIANT=cuda
# Triton compiles a launcher with the system's compiler when a kernel is used first.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY requirements.lock constraints.txt /tmp/
COPY --from=build /wheels /wheels
RUN case "$VARIANT" in \
        cuda) pip install --no-cache-dir --constraint /tmp/requirements.lock \
            "$(echo /wheels/baleen_kernels-*.whl)[cuda]" /wheels/baleen-*.whl ;; \
        cpu) pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
            --constraint /tmp/requirements.lock --constraint /tmp/constraints.txt \
            /wheels/baleen_kernels-*.whl /wheels/baleen-*.whl ;; \
        *) echo "VARIANT is cuda or cpu, not $VARIANT" >&2; exit 1 ;; \
    esac
COPY models/micro /models/micro
USER 10001:10001
EXPOSE 30001 8998
ENTRYPOINT ["python", "-m", "baleen_worker"]
