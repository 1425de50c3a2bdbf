# docker build -t tilerank .   The first stage compiles a wheel; the second has neither compiler nor sources.
FROM python:3.11-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends g++
COPY . /src
RUN pip wheel --no-deps --wheel-dir /wheels /src

FROM python:3.11-slim-bookworm
# If the package index offers torch with CUDA only: --build-arg PIP_EXTRA_INDEX_URL=(the index of PyTorch's CPU builds)
ARG PIP_EXTRA_INDEX_URL
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/tilerank-*.whl)[vision]" && useradd --uid 1000 --create-home tilerank
USER tilerank
ENV HF_HOME=/home/tilerank/models
# A new volume belongs to the owner of the image's folder of that name, and to root if there is none.
RUN mkdir $HF_HOME
VOLUME /home/tilerank/models
EXPOSE 8000
# Reads where it listens, and whether it speaks TLS, from the command line of process 1.
HEALTHCHECK --start-period=30s CMD ["python", "-m", "tilerank.launch.health", "1"]
# docker run -p 8000:8000 -v models:/home/tilerank/models tilerank Qwen/Qwen3-0.6B --tp auto
ENTRYPOINT ["tilerank", "serve", "--host", "0.0.0.0"]
