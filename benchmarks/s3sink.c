/*
 * s3sink: an S3 server that keeps its objects in memory, for measuring clients.
 *
 *     cc -O2 -pthread -o s3sink s3sink.c
 *     ./s3sink --port 0 [--latency-ms N] [--rate-mbps N] [--total-mbps N] [--fail-every N] [--preallocate-mib N]
 *
 * It listens on 127.0.0.1, prints "listening on PORT" and serves until it is killed. One thread a connection, blocking
 * sockets: a body is received straight into recycled 4 MiB blocks and sent straight from them, so that the server costs
 * one copy each way and what is measured is the client.
 *
 * Object requests: PUT (also as a copy), GET, HEAD, DELETE, multiple DELETE, ListObjectsV2, and of multipart uploads
 * Create, UploadPart, Complete, Abort. Honoured: Range, If-Match, If-None-Match, Expect, aws-chunked bodies. Kept and
 * given back: Content-Type, x-amz-meta-*, x-amz-checksum-*. Every bucket exists; signatures and checksums are not
 * verified.
 *
 * Pacing:   --latency-ms   sleep before every reply
 *           --rate-mbps    megabits per second of each connection, each way
 *           --total-mbps   megabits per second of all connections together
 *           --fail-every   every Nth object request is answered 503 SlowDown
 *           --preallocate-mib  blocks that exist, and are touched, before the first request
 *
 * For whoever measures (no latency, no pacing):
 *           GET  /_stats   counters as JSON
 *           GET  /_log     the last requests since the reset, one JSON object per line
 *           POST /_reset   forget all objects, uploads and log lines
 *           POST /_set?latency_ms=N&rate_mbps=N&total_mbps=N&fail_every=N   change the options named
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define XML "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"

enum {
    BLOCK = 4 << 20,      /* bytes of a storage block */
    SMALL_TAIL = 1 << 20, /* the rest of a body takes a block of its own from this size on */
    PACED = 128 << 10,    /* bytes between two looks at the clock when a rate is set */
    BUFFER = 64 << 10,    /* received bytes that wait to be parsed */
    HEAD = 64 << 10,      /* longest request head */
    HEADERS = 128,
    LOGGED = 8192,
};

static atomic_int latency_ms;
static atomic_long rate_mbps, total_mbps, fail_every;
static atomic_ulong sequence = 1;
static atomic_ulong requests, failed, bytes_in, bytes_out, connections;

/* ------------------------------------------------------------------------------------------------ small things */

static void die(const char *what)
{
    perror(what);
    exit(1);
}

static void *allocate(size_t size)
{
    void *memory = calloc(1, size ? size : 1);
    if (!memory)
        die("calloc");
    return memory;
}

static char *copy_text(const char *text)
{
    char *copy = strdup(text);
    if (!copy)
        die("strdup");
    return copy;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void sleep_for(double seconds)
{
    if (seconds <= 0)
        return;
    struct timespec t = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    while (nanosleep(&t, &t) && errno == EINTR)
        ;
}

typedef struct {
    char *text;
    size_t used, room;
} Text;

static void add(Text *to, const char *format, ...)
{
    for (;;) {
        va_list arguments;
        va_start(arguments, format);
        size_t left = to->room - to->used;
        int count = vsnprintf(to->text ? to->text + to->used : NULL, left, format, arguments);
        va_end(arguments);
        if (to->text && (size_t)count < left) {
            to->used += (size_t)count;
            return;
        }
        to->room = to->room * 2 + (size_t)count + 256;
        to->text = realloc(to->text, to->room);
        if (!to->text)
            die("realloc");
    }
}

static void add_escaped(Text *to, const char *text, bool as_url)
{
    for (; *text; text++) {
        unsigned char c = (unsigned char)*text;
        if (as_url && !isalnum(c) && !strchr("-._~/", c))
            add(to, "%%%02X", c);
        else if (c == '&')
            add(to, "&amp;");
        else if (c == '<')
            add(to, "&lt;");
        else if (c == '>')
            add(to, "&gt;");
        else
            add(to, "%c", c);
    }
}

static int hex_digit(int c)
{
    return isdigit(c) ? c - '0' : tolower(c) - 'a' + 10;
}

static void percent_decode(char *text)
{
    char *to = text;
    for (; *text; text++) {
        if (text[0] == '%' && isxdigit((unsigned char)text[1]) && isxdigit((unsigned char)text[2])) {
            *to++ = (char)(hex_digit(text[1]) * 16 + hex_digit(text[2]));
            text += 2;
        } else {
            *to++ = *text;
        }
    }
    *to = 0;
}

static void http_date(char out[40], time_t when)
{
    struct tm parts;
    gmtime_r(&when, &parts);
    strftime(out, 40, "%a, %d %b %Y %H:%M:%S GMT", &parts);
}

static void iso_date(char out[40], time_t when)
{
    struct tm parts;
    gmtime_r(&when, &parts);
    strftime(out, 40, "%Y-%m-%dT%H:%M:%S.000Z", &parts);
}

/* ------------------------------------------------------------------------------------------- blocks and bodies */

static pthread_mutex_t block_lock = PTHREAD_MUTEX_INITIALIZER;
static void *free_blocks; /* linked through their first word */

static char *new_block(void)
{
    char *block = mmap(NULL, BLOCK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED)
        die("mmap");
    madvise(block, BLOCK, MADV_HUGEPAGE);
    return block;
}

static char *take_block(void)
{
    pthread_mutex_lock(&block_lock);
    void *block = free_blocks;
    if (block)
        free_blocks = *(void **)block;
    pthread_mutex_unlock(&block_lock);
    return block ? block : new_block();
}

static void give_block(void *block)
{
    pthread_mutex_lock(&block_lock);
    *(void **)block = free_blocks;
    free_blocks = block;
    pthread_mutex_unlock(&block_lock);
}

/* The bytes of one request. Never changed once received, shared by counting. */
typedef struct {
    atomic_int users;
    uint64_t size;
    size_t count; /* pieces of BLOCK bytes, the last one shorter */
    char **pieces;
    char etag[40];      /* without quotes */
    char checksum[160]; /* a whole header line without its end, or "" */
} Body;

static size_t piece_length(const Body *body, size_t index)
{
    uint64_t left = body->size - (uint64_t)index * BLOCK;
    return left < BLOCK ? (size_t)left : BLOCK;
}

static Body *new_body(uint64_t size)
{
    Body *body = allocate(sizeof *body);
    body->users = 1;
    body->size = size;
    body->count = (size_t)((size + BLOCK - 1) / BLOCK);
    body->pieces = allocate(body->count * sizeof *body->pieces);
    for (size_t i = 0; i < body->count; i++) {
        size_t length = piece_length(body, i);
        body->pieces[i] = length < SMALL_TAIL ? allocate(length) : take_block();
    }
    unsigned long number = atomic_fetch_add(&sequence, 1);
    snprintf(body->etag, sizeof body->etag, "%016lx%016" PRIx64, number * 0x9E3779B97F4A7C15ul, size);
    return body;
}

static Body *use_body(Body *body)
{
    atomic_fetch_add(&body->users, 1);
    return body;
}

static void drop_body(Body *body)
{
    if (!body || atomic_fetch_sub(&body->users, 1) != 1)
        return;
    for (size_t i = 0; i < body->count; i++) {
        if (piece_length(body, i) < SMALL_TAIL)
            free(body->pieces[i]);
        else
            give_block(body->pieces[i]);
    }
    free(body->pieces);
    free(body);
}

static char *body_text(const Body *body)
{
    char *text = allocate(body->size + 1);
    for (size_t i = 0; i < body->count; i++)
        memcpy(text + i * (size_t)BLOCK, body->pieces[i], piece_length(body, i));
    return text;
}

/* --------------------------------------------------------------------------------------- objects and uploads */

typedef struct Object {
    struct Object *next;
    atomic_int users;
    char *name; /* bucket/key */
    uint64_t size;
    size_t count;
    Body **bodies;
    char etag[48];
    char *kind;     /* content type */
    char *metadata; /* x-amz-meta-* header lines, each with its end */
    time_t written;
} Object;

typedef struct Upload {
    struct Upload *next;
    char *name, *kind, *metadata;
    char id[40];
    int room;
    Body **parts; /* part n at n - 1 */
} Upload;

enum { SLOTS = 1 << 16 };
static pthread_mutex_t store_lock = PTHREAD_MUTEX_INITIALIZER;
static Object *store[SLOTS];
static long stored;
static Upload *uploads;

static Object **slot_of(const char *name)
{
    uint32_t hash = 2166136261u;
    for (const char *c = name; *c; c++)
        hash = (hash ^ (uint8_t)*c) * 16777619u;
    Object **slot = &store[hash % SLOTS];
    while (*slot && strcmp((*slot)->name, name))
        slot = &(*slot)->next;
    return slot;
}

static Object *new_object(const char *name, const char *kind, char *metadata)
{
    Object *object = allocate(sizeof *object);
    object->users = 1;
    object->name = copy_text(name);
    object->kind = copy_text(kind ? kind : "binary/octet-stream");
    object->metadata = metadata;
    object->written = time(NULL);
    return object;
}

static void add_body(Object *object, Body *body)
{
    if (!(object->count & (object->count - 1))) { /* 0 or a power of two: full */
        size_t room = object->count ? object->count * 2 : 1;
        object->bodies = realloc(object->bodies, room * sizeof *object->bodies);
        if (!object->bodies)
            die("realloc");
    }
    object->bodies[object->count++] = body;
    object->size += body->size;
}

static void drop_object(Object *object)
{
    if (!object || atomic_fetch_sub(&object->users, 1) != 1)
        return;
    for (size_t i = 0; i < object->count; i++)
        drop_body(object->bodies[i]);
    free(object->bodies);
    free(object->name);
    free(object->kind);
    free(object->metadata);
    free(object);
}

static Object *find_object(const char *name)
{
    pthread_mutex_lock(&store_lock);
    Object *object = *slot_of(name);
    if (object)
        atomic_fetch_add(&object->users, 1);
    pthread_mutex_unlock(&store_lock);
    return object;
}

static void remove_slot(Object **slot)
{
    Object *object = *slot;
    *slot = object->next;
    stored--;
    drop_object(object);
}

static void delete_object(const char *name)
{
    pthread_mutex_lock(&store_lock);
    Object **slot = slot_of(name);
    if (*slot)
        remove_slot(slot);
    pthread_mutex_unlock(&store_lock);
}

static bool names_etag(const char *condition, const char *etag)
{
    size_t length = strlen(etag);
    while (*condition == '"' || *condition == ' ')
        condition++;
    return !strcmp(condition, "*") || (!strncmp(condition, etag, length) && strchr("\" ", condition[length]));
}

/* Puts an object in its place if the conditions hold. Returns 0, or the status of the refusal. */
static int store_object(Object *object, const char *if_match, const char *if_none_match)
{
    int refusal = 0;
    pthread_mutex_lock(&store_lock);
    Object **slot = slot_of(object->name);
    if (if_none_match && *slot)
        refusal = 412;
    else if (if_match && !*slot)
        refusal = 404;
    else if (if_match && !names_etag(if_match, (*slot)->etag))
        refusal = 412;
    if (!refusal) {
        if (*slot)
            remove_slot(slot);
        slot = slot_of(object->name);
        object->next = *slot;
        *slot = object;
        stored++;
    }
    pthread_mutex_unlock(&store_lock);
    if (refusal)
        drop_object(object);
    return refusal;
}

static Upload **find_upload(const char *id, const char *name) /* with store_lock held */
{
    Upload **upload = &uploads;
    while (*upload && (strcmp((*upload)->id, id) || strcmp((*upload)->name, name)))
        upload = &(*upload)->next;
    return upload;
}

static void drop_upload(Upload *upload)
{
    for (int i = 0; i < upload->room; i++)
        drop_body(upload->parts[i]);
    free(upload->parts);
    free(upload->name);
    free(upload->kind);
    free(upload->metadata);
    free(upload);
}

/* ------------------------------------------------------------------------------------------------ connections */

typedef struct {
    int socket;
    size_t first, end; /* of what is in the buffer and not yet taken */
    double slot;       /* when this connection may move bytes again */
    char buffer[BUFFER];
} Connection;

static pthread_mutex_t pace_lock = PTHREAD_MUTEX_INITIALIZER;
static double shared_slot;

/* Sleeps as long as moving count bytes takes at a rate; short silences may be made up for. */
static double next_slot(double *slot, size_t count, long mbps)
{
    double t = now();
    if (*slot < t - 0.02)
        *slot = t - 0.02;
    *slot += (double)count * 8e-6 / (double)mbps;
    return *slot - t;
}

static void pace(Connection *c, size_t count)
{
    if (rate_mbps)
        sleep_for(next_slot(&c->slot, count, rate_mbps));
    if (total_mbps) {
        pthread_mutex_lock(&pace_lock);
        double wait = next_slot(&shared_slot, count, total_mbps);
        pthread_mutex_unlock(&pace_lock);
        sleep_for(wait);
    }
}

static bool paced(void)
{
    return rate_mbps || total_mbps;
}

static ssize_t receive(Connection *c, char *to, size_t count)
{
    ssize_t got;
    if (paced() && count > PACED)
        count = PACED;
    do
        got = recv(c->socket, to, count, 0);
    while (got < 0 && errno == EINTR);
    if (got > 0) {
        atomic_fetch_add(&bytes_in, (unsigned long)got);
        pace(c, (size_t)got);
    }
    return got;
}

static int transmit(Connection *c, const char *from, size_t count, bool more)
{
    while (count) {
        size_t step = paced() && count > PACED ? PACED : count;
        ssize_t sent = send(c->socket, from, step, MSG_NOSIGNAL | (more ? MSG_MORE : 0));
        if (sent < 0 && errno == EINTR)
            continue;
        if (sent < 0)
            return -1;
        atomic_fetch_add(&bytes_out, (unsigned long)sent);
        pace(c, (size_t)sent);
        from += sent;
        count -= (size_t)sent;
    }
    return 0;
}

/* Some bytes: out of the buffer, or straight from the socket when many are wanted. */
static ssize_t take_some(Connection *c, char *to, size_t count)
{
    if (c->first == c->end) {
        if (count >= BUFFER)
            return receive(c, to, count);
        ssize_t got = receive(c, c->buffer, BUFFER);
        if (got <= 0)
            return got;
        c->first = 0;
        c->end = (size_t)got;
    }
    size_t have = c->end - c->first;
    if (have > count)
        have = count;
    memcpy(to, c->buffer + c->first, have);
    c->first += have;
    return (ssize_t)have;
}

static int take_exactly(Connection *c, char *to, size_t count)
{
    while (count) {
        ssize_t got = take_some(c, to, count);
        if (got <= 0)
            return -1;
        to += got;
        count -= (size_t)got;
    }
    return 0;
}

/* A line without its end. Returns its length, or -1. */
static int take_line(Connection *c, char *to, size_t room)
{
    size_t used = 0;
    char byte;
    while (!take_exactly(c, &byte, 1)) {
        if (byte == '\n') {
            if (used && to[used - 1] == '\r')
                used--;
            to[used] = 0;
            return (int)used;
        }
        if (used + 1 >= room)
            return -1;
        to[used++] = byte;
    }
    return -1;
}

/* --------------------------------------------------------------------------------------------------- requests */

typedef struct {
    char method[16];
    char *path, *query; /* path decoded, query as it came */
    char *bucket, *key; /* key is "" for requests about a bucket */
    char *names[HEADERS], *values[HEADERS];
    int headers;
    bool is_head, close;
    int status;
    char head[HEAD];
} Request;

static const char *header(const Request *r, const char *name)
{
    for (int i = 0; i < r->headers; i++)
        if (!strcasecmp(r->names[i], name))
            return r->values[i];
    return NULL;
}

/* The decoded value of a query parameter ("" if it has none), or NULL. */
static const char *parameter(const Request *r, const char *name, char *out, size_t room)
{
    size_t length = strlen(name);
    for (const char *p = r->query; p && *p; p = *p ? p + 1 : p) {
        size_t whole = strcspn(p, "&");
        if (!strncmp(p, name, length) && (whole == length || (whole > length && p[length] == '='))) {
            snprintf(out, room, "%.*s", whole > length ? (int)(whole - length - 1) : 0, p + length + 1);
            percent_decode(out);
            return out;
        }
        p += whole;
    }
    return NULL;
}

static int reply(Connection *c, Request *r, int status, const char *reason, const char *headers, const char *body,
                 size_t length)
{
    char head[8192], date[40];
    r->status = status;
    if (r->path[1] != '_')
        sleep_for(latency_ms / 1e3);
    http_date(date, time(NULL));
    int used = snprintf(head, sizeof head,
                        "HTTP/1.1 %d %s\r\nServer: s3sink\r\nDate: %s\r\nx-amz-request-id: %016lX\r\n%s%s", status,
                        reason, date, atomic_fetch_add(&sequence, 1), headers ? headers : "",
                        r->close ? "Connection: close\r\n" : "");
    size_t room = sizeof head - (size_t)used;
    if (status == 204)
        used += snprintf(head + used, room, "\r\n");
    else
        used += snprintf(head + used, room, "Content-Type: application/xml\r\nContent-Length: %zu\r\n\r\n", length);
    bool with_body = length && !r->is_head;
    if (transmit(c, head, (size_t)used, with_body))
        return -1;
    return with_body ? transmit(c, body, length, false) : 0;
}

static int reply_text(Connection *c, Request *r, Text *text)
{
    int result = reply(c, r, 200, "OK", NULL, text->text, text->used);
    free(text->text);
    return result;
}

static int refuse(Connection *c, Request *r, int status, const char *code)
{
    Text text = {0};
    add(&text, XML "<Error><Code>%s</Code><Message>%s</Message><Resource>", code, code);
    add_escaped(&text, r->path, false);
    add(&text, "</Resource></Error>");
    int result = reply(c, r, status, code, NULL, text.text, text.used);
    free(text.text);
    return result;
}

static int refuse_condition(Connection *c, Request *r, int status)
{
    return status == 404 ? refuse(c, r, 404, "NoSuchKey") : refuse(c, r, 412, "PreconditionFailed");
}

static char *metadata_of(const Request *r)
{
    Text text = {0};
    add(&text, "%s", "");
    for (int i = 0; i < r->headers; i++) {
        if (strncasecmp(r->names[i], "x-amz-meta-", 11))
            continue;
        for (char *c = r->names[i]; *c; c++) /* S3 keeps the names in lower case */
            *c = (char)tolower((unsigned char)*c);
        add(&text, "%s: %s\r\n", r->names[i], r->values[i]);
    }
    return text.text;
}

/* ------------------------------------------------------------------------------------------- receiving bodies */

static int take_into(Connection *c, Body *body, uint64_t offset, uint64_t count)
{
    while (count) {
        size_t index = (size_t)(offset / BLOCK), within = (size_t)(offset % BLOCK);
        size_t room = piece_length(body, index) - within;
        if (room > count)
            room = (size_t)count;
        if (take_exactly(c, body->pieces[index] + within, room))
            return -1;
        offset += room;
        count -= room;
    }
    return 0;
}

static void note_checksum(Body *body, const char *name, const char *value)
{
    bool is_value = !strncasecmp(name, "x-amz-checksum-", 15) && strcasecmp(name, "x-amz-checksum-algorithm") &&
                    strcasecmp(name, "x-amz-checksum-type") && strcasecmp(name, "x-amz-checksum-mode");
    if (is_value)
        snprintf(body->checksum, sizeof body->checksum, "%.40s: %.100s", name, value);
}

/* aws-chunked: "<hex size>[;signature]" lines, data, and trailers behind an empty chunk. */
static int take_chunks(Connection *c, Body *body)
{
    char line[1024];
    uint64_t offset = 0;
    for (;;) {
        if (take_line(c, line, sizeof line) < 0)
            return -1;
        uint64_t count = strtoull(line, NULL, 16);
        if (!count)
            break;
        if (offset + count > body->size || take_into(c, body, offset, count) || take_line(c, line, sizeof line))
            return -1;
        offset += count;
    }
    for (;;) {
        int length = take_line(c, line, sizeof line);
        if (length <= 0)
            return length < 0 || offset != body->size ? -1 : 0;
        char *value = strchr(line, ':');
        if (value) {
            *value++ = 0;
            note_checksum(body, line, value + strspn(value, " "));
        }
    }
}

/* The request's body, or NULL when the connection is of no more use. */
static Body *take_body(Connection *c, const Request *r)
{
    const char *length = header(r, "content-length"), *decoded = header(r, "x-amz-decoded-content-length");
    const char *expect = header(r, "expect"), *sha256 = header(r, "x-amz-content-sha256");
    static const char go_on[] = "HTTP/1.1 100 Continue\r\n\r\n";
    if (expect && !strcasecmp(expect, "100-continue") && transmit(c, go_on, sizeof go_on - 1, false))
        return NULL;
    bool chunked = sha256 && !strncmp(sha256, "STREAMING-", 10);
    Body *body = new_body(strtoull(chunked && decoded ? decoded : length ? length : "0", NULL, 10));
    for (int i = 0; i < r->headers; i++)
        note_checksum(body, r->names[i], r->values[i]);
    if (chunked ? take_chunks(c, body) : take_into(c, body, 0, body->size)) {
        drop_body(body);
        return NULL;
    }
    return body;
}

/* ---------------------------------------------------------------------------------------------------- objects */

static int put_object(Connection *c, Request *r, const char *name, Body *body)
{
    const char *source = header(r, "x-amz-copy-source");
    Object *object;
    if (source) { /* a copy shares the bytes */
        char *from = copy_text(source + (*source == '/'));
        percent_decode(from);
        Object *original = find_object(from);
        free(from);
        drop_body(body);
        if (!original)
            return refuse(c, r, 404, "NoSuchKey");
        object = new_object(name, original->kind, copy_text(original->metadata));
        for (size_t i = 0; i < original->count; i++)
            add_body(object, use_body(original->bodies[i]));
        snprintf(object->etag, sizeof object->etag, "%s", original->etag);
        drop_object(original);
    } else {
        object = new_object(name, header(r, "content-type"), metadata_of(r));
        snprintf(object->etag, sizeof object->etag, "%s", body->etag);
        add_body(object, body);
    }
    atomic_fetch_add(&object->users, 1);
    int refusal = store_object(object, header(r, "if-match"), header(r, "if-none-match"));
    int result;
    if (refusal) {
        result = refuse_condition(c, r, refusal);
    } else if (source) {
        char date[40];
        Text text = {0};
        iso_date(date, object->written);
        add(&text, "<CopyObjectResult><LastModified>%s</LastModified><ETag>\"%s\"</ETag></CopyObjectResult>", date,
            object->etag);
        result = reply_text(c, r, &text);
    } else {
        char headers[300];
        const char *checksum = object->bodies[0]->checksum;
        snprintf(headers, sizeof headers, "ETag: \"%s\"\r\n%s%s", object->etag, checksum, *checksum ? "\r\n" : "");
        result = reply(c, r, 200, "OK", headers, "", 0);
    }
    drop_object(object);
    return result;
}

/* Reads "bytes=a-b", "bytes=a-" or "bytes=-n" into [first, end). Returns 1 for a range, 0 for none, -1 for bad ones. */
static int parse_range(const char *text, uint64_t size, uint64_t *first, uint64_t *end)
{
    *first = 0;
    *end = size;
    if (!text || strncmp(text, "bytes=", 6) || strchr(text, ','))
        return 0;
    text += 6;
    char *rest;
    if (*text == '-') {
        uint64_t count = strtoull(text + 1, NULL, 10);
        *first = count < size ? size - count : 0;
        return count && size ? 1 : -1;
    }
    *first = strtoull(text, &rest, 10);
    if (*rest == '-' && isdigit((unsigned char)rest[1])) {
        uint64_t last = strtoull(rest + 1, NULL, 10);
        if (last + 1 < size)
            *end = last + 1;
        if (last < *first)
            return -1;
    }
    return *first < size ? 1 : -1;
}

static int send_bodies(Connection *c, const Object *object, uint64_t first, uint64_t end)
{
    uint64_t position = 0;
    for (size_t i = 0; i < object->count && position < end; position += object->bodies[i++]->size) {
        const Body *body = object->bodies[i];
        if (position + body->size <= first)
            continue;
        uint64_t from = first > position ? first - position : 0;
        uint64_t to = end - position < body->size ? end - position : body->size;
        while (from < to) {
            size_t index = (size_t)(from / BLOCK), within = (size_t)(from % BLOCK);
            size_t count = piece_length(body, index) - within;
            if (count > to - from)
                count = (size_t)(to - from);
            if (transmit(c, body->pieces[index] + within, count, false))
                return -1;
            from += count;
        }
    }
    return 0;
}

static int get_object(Connection *c, Request *r, const char *name)
{
    Object *object = find_object(name);
    if (!object)
        return refuse(c, r, 404, "NoSuchKey");
    const char *if_match = header(r, "if-match");
    uint64_t first, end;
    int ranged = parse_range(header(r, "range"), object->size, &first, &end);
    if ((if_match && !names_etag(if_match, object->etag)) || ranged < 0) {
        drop_object(object);
        return ranged < 0 ? refuse(c, r, 416, "InvalidRange") : refuse(c, r, 412, "PreconditionFailed");
    }
    char date[40], written[40];
    http_date(date, time(NULL));
    http_date(written, object->written);
    Text head = {0};
    r->status = ranged ? 206 : 200;
    add(&head, "HTTP/1.1 %s\r\nServer: s3sink\r\nDate: %s\r\nx-amz-request-id: %016lX\r\nLast-Modified: %s\r\n",
        ranged ? "206 Partial Content" : "200 OK", date, atomic_fetch_add(&sequence, 1), written);
    add(&head, "ETag: \"%s\"\r\nAccept-Ranges: bytes\r\nContent-Type: %s\r\nContent-Length: %" PRIu64 "\r\n%s",
        object->etag, object->kind, end - first, object->metadata);
    if (ranged)
        add(&head, "Content-Range: bytes %" PRIu64 "-%" PRIu64 "/%" PRIu64 "\r\n", first, end - 1, object->size);
    if (header(r, "x-amz-checksum-mode") && !ranged && object->count == 1 && *object->bodies[0]->checksum)
        add(&head, "%s\r\n", object->bodies[0]->checksum);
    add(&head, "%s\r\n", r->close ? "Connection: close\r\n" : "");
    sleep_for(latency_ms / 1e3);
    bool with_body = !r->is_head && end > first;
    int result = transmit(c, head.text, head.used, with_body);
    if (!result && with_body)
        result = send_bodies(c, object, first, end);
    free(head.text);
    drop_object(object);
    return result;
}

/* -------------------------------------------------------------------------------------------------- multipart */

static int create_upload(Connection *c, Request *r, const char *name)
{
    Upload *upload = allocate(sizeof *upload);
    upload->name = copy_text(name);
    upload->kind = copy_text(header(r, "content-type") ? header(r, "content-type") : "binary/octet-stream");
    upload->metadata = metadata_of(r);
    snprintf(upload->id, sizeof upload->id, "upload%016lx", atomic_fetch_add(&sequence, 1));
    Text text = {0};
    add(&text, XML "<InitiateMultipartUploadResult><Bucket>%s</Bucket><Key>", r->bucket);
    add_escaped(&text, r->key, false);
    add(&text, "</Key><UploadId>%s</UploadId></InitiateMultipartUploadResult>", upload->id);
    pthread_mutex_lock(&store_lock);
    upload->next = uploads;
    uploads = upload;
    pthread_mutex_unlock(&store_lock);
    return reply_text(c, r, &text);
}

static int put_part(Connection *c, Request *r, const char *name, const char *id, int number, Body *body)
{
    if (number < 1 || number > 10000) {
        drop_body(body);
        return refuse(c, r, 400, "InvalidArgument");
    }
    char headers[300];
    snprintf(headers, sizeof headers, "ETag: \"%s\"\r\n%s%s", body->etag, body->checksum,
             *body->checksum ? "\r\n" : "");
    Body *old = body;
    pthread_mutex_lock(&store_lock);
    Upload *upload = *find_upload(id, name);
    if (upload) {
        if (number > upload->room) {
            int room = number + 64;
            upload->parts = realloc(upload->parts, (size_t)room * sizeof *upload->parts);
            if (!upload->parts)
                die("realloc");
            memset(upload->parts + upload->room, 0, (size_t)(room - upload->room) * sizeof *upload->parts);
            upload->room = room;
        }
        old = upload->parts[number - 1];
        upload->parts[number - 1] = body;
    }
    pthread_mutex_unlock(&store_lock);
    drop_body(old);
    return upload ? reply(c, r, 200, "OK", headers, "", 0) : refuse(c, r, 404, "NoSuchUpload");
}

/* Collects the named parts. Returns NULL, or the error code. */
static const char *collect_parts(Object *object, const Upload *upload, const char *xml)
{
    int last = 0;
    for (const char *part = xml; (part = strstr(part, "<Part>")); part++) {
        const char *end = strstr(part, "</Part>"), *etag = strstr(part, "<ETag>");
        const char *number = strstr(part, "<PartNumber>");
        if (!end || !number || number > end || !etag || etag > end)
            return "MalformedXML";
        int n = atoi(number + strlen("<PartNumber>"));
        if (n <= last)
            return "InvalidPartOrder";
        if (n > upload->room || !upload->parts[n - 1])
            return "InvalidPart";
        Body *body = upload->parts[n - 1];
        const char *found = strstr(etag, body->etag);
        if (!found || found > end)
            return "InvalidPart";
        add_body(object, use_body(body));
        last = n;
    }
    return object->count ? NULL : "MalformedXML";
}

static int complete_upload(Connection *c, Request *r, const char *name, const char *id, const Body *body)
{
    char *xml = body_text(body);
    const char *code = "NoSuchUpload";
    Object *object = NULL;
    pthread_mutex_lock(&store_lock);
    Upload **place = find_upload(id, name), *upload = *place;
    if (upload) {
        object = new_object(name, upload->kind, copy_text(upload->metadata));
        code = collect_parts(object, upload, xml);
        if (!code)
            *place = upload->next;
    }
    pthread_mutex_unlock(&store_lock);
    free(xml);
    if (code) {
        drop_object(object);
        return refuse(c, r, upload ? 400 : 404, code);
    }
    drop_upload(upload); /* parts that were not named go with it */
    char etag[48];
    snprintf(etag, sizeof etag, "%.32s-%zu", object->bodies[object->count - 1]->etag, object->count);
    snprintf(object->etag, sizeof object->etag, "%s", etag);
    int refusal = store_object(object, header(r, "if-match"), header(r, "if-none-match"));
    if (refusal)
        return refuse_condition(c, r, refusal);
    Text text = {0};
    add(&text, XML "<CompleteMultipartUploadResult><Bucket>%s</Bucket><Key>", r->bucket);
    add_escaped(&text, r->key, false);
    add(&text, "</Key><ETag>\"%s\"</ETag></CompleteMultipartUploadResult>", etag);
    return reply_text(c, r, &text);
}

static int abort_upload(Connection *c, Request *r, const char *name, const char *id)
{
    pthread_mutex_lock(&store_lock);
    Upload **place = find_upload(id, name), *upload = *place;
    if (upload)
        *place = upload->next;
    pthread_mutex_unlock(&store_lock);
    if (!upload)
        return refuse(c, r, 404, "NoSuchUpload");
    drop_upload(upload);
    return reply(c, r, 204, "No Content", NULL, "", 0);
}

/* ---------------------------------------------------------------------------------------------------- buckets */

typedef struct {
    char key[1100];
    char etag[48], date[40];
    uint64_t size;
} Listed;

static int by_key(const void *a, const void *b)
{
    return strcmp(((const Listed *)a)->key, ((const Listed *)b)->key);
}

/* All objects of a bucket below a prefix, sorted. */
static Listed *collect_listed(const char *bucket, const char *prefix, size_t *count)
{
    size_t skip = strlen(bucket) + 1;
    *count = 0;
    pthread_mutex_lock(&store_lock);
    Listed *listed = allocate((size_t)stored * sizeof *listed);
    for (size_t i = 0; i < SLOTS; i++) {
        for (const Object *o = store[i]; o; o = o->next) {
            bool inside = !strncmp(o->name, bucket, skip - 1) && o->name[skip - 1] == '/';
            if (!inside || strncmp(o->name + skip, prefix, strlen(prefix)))
                continue;
            Listed *item = &listed[(*count)++];
            snprintf(item->key, sizeof item->key, "%s", o->name + skip);
            snprintf(item->etag, sizeof item->etag, "%s", o->etag);
            iso_date(item->date, o->written);
            item->size = o->size;
        }
    }
    pthread_mutex_unlock(&store_lock);
    qsort(listed, *count, sizeof *listed, by_key);
    return listed;
}

/* ListObjectsV2. The continuation token is the last key, or common prefix, that was given. */
static int list_objects(Connection *c, Request *r)
{
    char prefix[1100] = "", delimiter[64] = "", after[1100] = "", most[16] = "1000", encoding[16] = "", last[1100] = "";
    parameter(r, "prefix", prefix, sizeof prefix);
    parameter(r, "delimiter", delimiter, sizeof delimiter);
    parameter(r, "start-after", after, sizeof after);
    parameter(r, "continuation-token", after, sizeof after);
    parameter(r, "max-keys", most, sizeof most);
    parameter(r, "encoding-type", encoding, sizeof encoding);
    bool as_url = !strcmp(encoding, "url"), truncated = false;
    size_t count, given = 0, limit = strtoul(most, NULL, 10);
    Listed *listed = collect_listed(r->bucket, prefix, &count);
    Text items = {0}, prefixes = {0}, text = {0};
    add(&items, "%s", "");
    add(&prefixes, "%s", "");
    for (size_t i = 0; i < count; i++) {
        const Listed *item = &listed[i];
        char *found = *delimiter ? strstr(item->key + strlen(prefix), delimiter) : NULL;
        char name[1100];
        int length = found ? (int)(found - item->key) + (int)strlen(delimiter) : (int)strlen(item->key);
        snprintf(name, sizeof name, "%.*s", length, item->key);
        if (strcmp(name, after) <= 0 || (found && !strcmp(name, last)))
            continue;
        if (given == limit) {
            truncated = true;
            break;
        }
        given++;
        snprintf(last, sizeof last, "%s", name);
        if (found) {
            add(&prefixes, "<CommonPrefixes><Prefix>");
            add_escaped(&prefixes, name, as_url);
            add(&prefixes, "</Prefix></CommonPrefixes>");
        } else {
            add(&items, "<Contents><Key>");
            add_escaped(&items, name, as_url);
            add(&items, "</Key><LastModified>%s</LastModified><ETag>\"%s\"</ETag><Size>%" PRIu64 "</Size></Contents>",
                item->date, item->etag, item->size);
        }
    }
    free(listed);
    add(&text, XML "<ListBucketResult><Name>%s</Name><Prefix>", r->bucket);
    add_escaped(&text, prefix, as_url);
    add(&text, "</Prefix><KeyCount>%zu</KeyCount><MaxKeys>%zu</MaxKeys><IsTruncated>%s</IsTruncated>", given, limit,
        truncated ? "true" : "false");
    if (as_url)
        add(&text, "<EncodingType>url</EncodingType>");
    if (truncated) {
        add(&text, "<NextContinuationToken>");
        add_escaped(&text, last, false);
        add(&text, "</NextContinuationToken>");
    }
    add(&text, "%s%s</ListBucketResult>", items.text, prefixes.text);
    free(items.text);
    free(prefixes.text);
    return reply_text(c, r, &text);
}

static int delete_objects(Connection *c, Request *r, const Body *body)
{
    char *xml = body_text(body);
    Text text = {0};
    add(&text, XML "<DeleteResult>");
    for (char *key = xml, *end; (key = strstr(key, "<Key>")) && (end = strstr(key, "</Key>")); key = end + 1) {
        char name[4096], *entity;
        key += strlen("<Key>");
        snprintf(name, sizeof name, "%s/%.*s", r->bucket, (int)(end - key), key);
        while ((entity = strstr(name, "&amp;")))
            memmove(entity + 1, entity + 5, strlen(entity + 5) + 1);
        delete_object(name);
        add(&text, "<Deleted><Key>%.*s</Key></Deleted>", (int)(end - key), key);
    }
    add(&text, "</DeleteResult>");
    free(xml);
    return reply_text(c, r, &text);
}

/* -------------------------------------------------------------------------------------------- log and control */

typedef struct {
    double start, end;
    int status;
    char method[8];
    char target[300];
} Logged;

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static Logged request_log[LOGGED];
static size_t logged;

static void note_request(const Request *r, double start)
{
    pthread_mutex_lock(&log_lock);
    Logged *entry = &request_log[logged++ % LOGGED];
    entry->start = start;
    entry->end = now();
    entry->status = r->status;
    snprintf(entry->method, sizeof entry->method, "%.7s", r->is_head ? "HEAD" : r->method);
    snprintf(entry->target, sizeof entry->target, "%.200s%s%.90s", r->path, r->query ? "?" : "",
             r->query ? r->query : "");
    for (char *p = entry->target; *p; p++)
        if (*p == '"' || *p == '\\' || (unsigned char)*p < ' ')
            *p = '?';
    pthread_mutex_unlock(&log_lock);
}

static int send_log(Connection *c, Request *r)
{
    Text text = {0};
    add(&text, "%s", "");
    pthread_mutex_lock(&log_lock);
    for (size_t i = logged > LOGGED ? logged - LOGGED : 0; i < logged; i++) {
        const Logged *entry = &request_log[i % LOGGED];
        add(&text, "{\"start\":%.6f,\"end\":%.6f,\"method\":\"%s\",\"target\":\"%s\",\"status\":%d}\n", entry->start,
            entry->end, entry->method, entry->target, entry->status);
    }
    pthread_mutex_unlock(&log_lock);
    return reply_text(c, r, &text);
}

static void reset(void)
{
    pthread_mutex_lock(&store_lock);
    for (size_t i = 0; i < SLOTS; i++)
        while (store[i])
            remove_slot(&store[i]);
    while (uploads) {
        Upload *upload = uploads;
        uploads = upload->next;
        drop_upload(upload);
    }
    pthread_mutex_unlock(&store_lock);
    pthread_mutex_lock(&log_lock);
    logged = 0;
    pthread_mutex_unlock(&log_lock);
    requests = failed = bytes_in = bytes_out = connections = 0;
}

static int control(Connection *c, Request *r)
{
    char value[64];
    Text text = {0};
    if (!strcmp(r->path, "/_log"))
        return send_log(c, r);
    if (!strcmp(r->path, "/_reset"))
        reset();
    if (!strcmp(r->path, "/_set")) {
        if (parameter(r, "latency_ms", value, sizeof value))
            latency_ms = atoi(value);
        if (parameter(r, "rate_mbps", value, sizeof value))
            rate_mbps = atol(value);
        if (parameter(r, "total_mbps", value, sizeof value))
            total_mbps = atol(value);
        if (parameter(r, "fail_every", value, sizeof value))
            fail_every = atol(value);
    }
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    double cpu = (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
                 (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
    add(&text, "{\"requests\":%lu,\"failed\":%lu,", requests, failed);
    add(&text, "\"bytes_in\":%lu,\"bytes_out\":%lu,", bytes_in, bytes_out);
    add(&text, "\"connections\":%lu,\"objects\":%ld,\"cpu_s\":%.3f}\n", connections, stored, cpu);
    return reply_text(c, r, &text);
}

/* --------------------------------------------------------------------------------------------------- dispatch */

static int serve_object(Connection *c, Request *r, Body *body)
{
    char name[4096], id[64], number[16];
    snprintf(name, sizeof name, "%.1000s/%.3000s", r->bucket, r->key);
    bool upload = parameter(r, "uploadId", id, sizeof id);
    if (!strcmp(r->method, "PUT")) {
        if (upload && header(r, "x-amz-copy-source")) {
            drop_body(body);
            return refuse(c, r, 501, "NotImplemented");
        }
        if (upload && parameter(r, "partNumber", number, sizeof number))
            return put_part(c, r, name, id, atoi(number), body);
        return put_object(c, r, name, body);
    }
    int result;
    if (!strcmp(r->method, "GET")) {
        result = upload ? refuse(c, r, 501, "NotImplemented") : get_object(c, r, name);
    } else if (!strcmp(r->method, "DELETE") && upload) {
        result = abort_upload(c, r, name, id);
    } else if (!strcmp(r->method, "DELETE")) {
        delete_object(name);
        result = reply(c, r, 204, "No Content", NULL, "", 0);
    } else if (!strcmp(r->method, "POST") && upload) {
        result = complete_upload(c, r, name, id, body);
    } else if (!strcmp(r->method, "POST") && parameter(r, "uploads", id, sizeof id)) {
        result = create_upload(c, r, name);
    } else {
        result = refuse(c, r, 405, "MethodNotAllowed");
    }
    drop_body(body);
    return result;
}

static int serve_bucket(Connection *c, Request *r, Body *body)
{
    char value[64];
    int result;
    if (!strcmp(r->method, "POST") && parameter(r, "delete", value, sizeof value)) {
        result = delete_objects(c, r, body);
    } else if (!strcmp(r->method, "GET") && parameter(r, "location", value, sizeof value)) {
        Text text = {0};
        add(&text, "<LocationConstraint>us-east-1</LocationConstraint>");
        result = reply_text(c, r, &text);
    } else if (!strcmp(r->method, "GET") && (parameter(r, "uploads", value, sizeof value) || !*r->bucket)) {
        result = refuse(c, r, 501, "NotImplemented");
    } else if (!strcmp(r->method, "GET") && !r->is_head) {
        result = list_objects(c, r);
    } else {
        result = reply(c, r, 200, "OK", "x-amz-bucket-region: us-east-1\r\n", "", 0);
    }
    drop_body(body);
    return result;
}

/* Answers one request whose head has been parsed. Returns -1 when the connection is of no more use. */
static int serve(Connection *c, Request *r)
{
    static atomic_long counted;
    if (header(r, "transfer-encoding")) {
        r->close = true;
        return refuse(c, r, 411, "MissingContentLength") | -1;
    }
    Body *body = take_body(c, r);
    if (!body)
        return -1;
    if (r->path[1] == '_') {
        drop_body(body);
        return control(c, r);
    }
    atomic_fetch_add(&requests, 1);
    if (fail_every && *r->key && (atomic_fetch_add(&counted, 1) + 1) % fail_every == 0) {
        drop_body(body);
        atomic_fetch_add(&failed, 1);
        return refuse(c, r, 503, "SlowDown");
    }
    return *r->key ? serve_object(c, r, body) : serve_bucket(c, r, body);
}

/* Reads a request's head. Returns 0, or -1 when there is none. */
static int take_head(Connection *c, Request *r)
{
    size_t used = 0;
    int length;
    memset(r, 0, offsetof(Request, head));
    while (!(length = take_line(c, r->head, HEAD))) /* empty lines before a request are allowed */
        ;
    if (length < 0)
        return -1;
    char *target = strchr(r->head, ' '), *version = target ? strchr(target + 1, ' ') : NULL;
    if (!version || target - r->head >= (long)sizeof r->method || target[1] != '/')
        return -1;
    *target++ = *version = 0;
    snprintf(r->method, sizeof r->method, "%.15s", r->head);
    r->path = target;
    r->query = strchr(target, '?');
    if (r->query)
        *r->query++ = 0;
    percent_decode(r->path);
    for (used = (size_t)length + 1;; used += (size_t)length + 1) {
        char *line = r->head + used;
        length = take_line(c, line, HEAD - used);
        if (length <= 0)
            break;
        char *value = strchr(line, ':');
        if (!value || r->headers == HEADERS)
            continue;
        *value++ = 0;
        r->names[r->headers] = line;
        r->values[r->headers++] = value + strspn(value, " \t");
    }
    const char *connection = header(r, "connection");
    r->close = connection && !strcasecmp(connection, "close");
    r->is_head = !strcmp(r->method, "HEAD");
    if (r->is_head)
        snprintf(r->method, sizeof r->method, "GET");
    return length;
}

static void *serve_connection(void *argument)
{
    int one = 1;
    Connection *c = allocate(sizeof *c);
    Request *r = allocate(sizeof *r);
    c->socket = (int)(intptr_t)argument;
    setsockopt(c->socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    atomic_fetch_add(&connections, 1);
    while (!take_head(c, r)) {
        double start = now();
        char *slash = strchr(r->path + 1, '/');
        char *bucket = copy_text(r->path + 1);
        r->bucket = bucket;
        r->key = slash ? bucket + (slash - r->path) : bucket + strlen(bucket);
        if (slash)
            bucket[slash - r->path - 1] = 0;
        int result = serve(c, r);
        if (r->path[1] != '_')
            note_request(r, start);
        free(bucket);
        if (result || r->close)
            break;
    }
    close(c->socket);
    free(r);
    free(c);
    return NULL;
}

int main(int count, char **arguments)
{
    int port = 0, one = 1;
    long preallocate_mib = 0;
    for (int i = 1; i + 1 < count; i += 2) {
        long value = atol(arguments[i + 1]);
        if (!strcmp(arguments[i], "--port"))
            port = (int)value;
        else if (!strcmp(arguments[i], "--latency-ms"))
            latency_ms = (int)value;
        else if (!strcmp(arguments[i], "--rate-mbps"))
            rate_mbps = value;
        else if (!strcmp(arguments[i], "--total-mbps"))
            total_mbps = value;
        else if (!strcmp(arguments[i], "--fail-every"))
            fail_every = value;
        else if (!strcmp(arguments[i], "--preallocate-mib"))
            preallocate_mib = value;
        else {
            fprintf(stderr, "unknown option %s; the head of s3sink.c lists them\n", arguments[i]);
            return 2;
        }
    }
    for (long i = 0; i < preallocate_mib * (1 << 20) / BLOCK; i++) {
        char *block = new_block();
        memset(block, 1, BLOCK);
        give_block(block);
    }
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, size) || listen(listener, 512))
        die("listen");
    if (getsockname(listener, (struct sockaddr *)&address, &size))
        die("getsockname");
    printf("listening on %d\n", ntohs(address.sin_port));
    fflush(stdout);
    pthread_attr_t detached;
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&detached, 256 << 10);
    for (;;) {
        pthread_t thread;
        int accepted = accept(listener, NULL, NULL);
        if (accepted < 0)
            continue;
        if (pthread_create(&thread, &detached, serve_connection, (void *)(intptr_t)accepted))
            close(accepted);
    }
}
