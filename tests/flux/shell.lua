-- The part of the Flux shell that scripts/flux/zarrfs.lua uses: lua shell.lua PLUGIN COMMAND. See flux-shell-initrc(5).

local handlers, environment, died = {}, {}, nil
shell = {
    rankinfo = { broker_rank = tonumber (os.getenv ("BROKER_RANK") or "0") },
    getenv = function (name) return environment[name] or os.getenv (name) end,
    setenv = function (name, value) environment[name] = value end,
    log_error = function (text) io.stderr:write ("error: " .. text .. "\n") end,
    die = function (text) died = text end,
}
task = { setenv = shell.setenv }
plugin = {
    register = function (about)
        for _, handler in ipairs (about.handlers) do
            handlers[handler.topic] = handler.fn
        end
    end,
}
dofile (arg[1])
local function call (topic)
    if handlers[topic] and not handlers[topic] (topic) or died then
        io.stderr:write ("died: " .. tostring (died) .. "\n")
        os.exit (1)
    end
end
call ("shell.init")
call ("task.init")
local exports = ""
for name, value in pairs (environment) do
    exports = exports .. "export " .. name .. "='" .. value .. "'; "
end
os.execute (exports .. arg[2])
call ("shell.exit")
